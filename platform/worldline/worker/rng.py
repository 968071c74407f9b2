"""One seed for every random generator a task may draw from."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers, the same on every platform."""
    data = b"".join(part.to_bytes(8, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def seed_all(*parts: int) -> None:
    """Seed torch (all devices), `random` and `numpy.random` from e.g. (seed, step, shard, micro-batch)."""
    seed = derive_seed(*parts)
    # Not torch.manual_seed: for each device not in use it formats a stack trace, a millisecond a step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
