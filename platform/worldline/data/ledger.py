"""What was trained, in one number: the digest of row ids. Pure."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def rows_digest(row_ids: npt.NDArray[np.int64]) -> int:
    """An unsigned 64-bit digest of these row ids in this order."""
    data = np.ascontiguousarray(row_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
