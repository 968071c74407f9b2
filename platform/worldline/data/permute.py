"""A keyed permutation whose values never change. Pure.

NumPy's `permutation` may differ from one NumPy version to the next; a run must not. The rank of index i is
decided by the i-th output of the splitmix64 generator seeded with the key, so it depends on (key, i) alone:
no state, nothing to save. Golden values in the tests hold it fast.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt

VERSION = 1

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from a list of parts; different lists give independent keys."""
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(key: int, n: int) -> npt.NDArray[np.uint64]:
    """The first n outputs of splitmix64 seeded with `key`."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + _GAMMA * np.arange(1, n + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return z ^ (z >> np.uint64(31))


def permutation(key: int, n: int) -> npt.NDArray[np.int64]:
    """0..n-1 in an order that depends on (key, n) alone: the indices sorted by their mixes, ties by index."""
    return np.argsort(mix(key, n), kind="stable").astype(np.int64, copy=False)
