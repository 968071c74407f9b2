"""What was trained, as digests of row ids: of one logical shard, and of a whole step. Pure."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def rows_digest(row_ids: npt.NDArray[np.int64]) -> int:
    """An unsigned 64-bit digest of these row ids in this order."""
    data = np.ascontiguousarray(row_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def step_digest(shards: npt.NDArray[np.int64]) -> str:
    """The digest of a step, from its shards' own: what `rows_digest` of a step record holds.

    shards: [num_shards, 2], the number of rows and their digest with the bits of a signed integer; zeros for
    a shard without rows.
    """
    data = np.ascontiguousarray(shards, dtype="<i8").tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
