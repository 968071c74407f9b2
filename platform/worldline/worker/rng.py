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
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
