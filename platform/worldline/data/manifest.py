"""What a data set is: its files, their row groups, one schema. Pure.

Made once by `scan`, stored with the run. Every row of the data set has an id: its index when the files are
laid one behind the other in manifest order.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class DataError(ValueError):
    """The data is not what the job says, or cannot be read; the message says where and what to change."""


@dataclass(frozen=True)
class FileEntry:
    """One Parquet file. path: relative to the root; row_groups: rows of each; digest: see `scan`."""

    path: str
    size: int
    row_groups: tuple[int, ...]
    digest: str

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)


@dataclass(frozen=True)
class Manifest:
    """The files of a data set in order, and the columns read from them.

    columns: (name, Arrow type) pairs: the one schema, to which each file's columns are cast.
    root: folder or URL the paths are relative to; not part of the digest, so data may be moved.
    """

    files: tuple[FileEntry, ...]
    columns: tuple[tuple[str, str], ...]
    root: str

    @cached_property
    def num_rows(self) -> int:
        return int(self.group_rows.sum())

    @cached_property
    def group_rows(self) -> IntArray:
        """Rows of every row group, over all files, in order."""
        return np.fromiter(chain.from_iterable(f.row_groups for f in self.files), dtype=np.int64)

    @cached_property
    def group_first_row(self) -> IntArray:
        """Id of the first row of every row group."""
        return np.cumsum(self.group_rows) - self.group_rows

    @cached_property
    def file_first_group(self) -> IntArray:
        """Index of the first row group of every file."""
        counts = np.array([len(f.row_groups) for f in self.files], dtype=np.int64)
        return np.cumsum(counts) - counts

    def locate_group(self, group: int) -> tuple[int, int]:
        """(file index, row group within the file) of a row group counted over all files."""
        # side="right" passes over files without row groups, which share their first group with the next file.
        file = int(np.searchsorted(self.file_first_group, group, side="right")) - 1
        return file, group - int(self.file_first_group[file])

    def first_row(self, file: int, row_group: int) -> int:
        """Id of the first row of a row group of a file."""
        return int(self.group_first_row[int(self.file_first_group[file]) + row_group])

    @cached_property
    def digest(self) -> str:
        content = self.to_dict()
        del content["root"]
        return hashlib.sha256(_canonical(content).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {"files": [asdict(f) for f in self.files], "columns": self.columns, "root": self.root}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        return cls(
            files=tuple(
                FileEntry(f["path"], f["size"], tuple(f["row_groups"]), f["digest"]) for f in content["files"]
            ),
            columns=tuple((name, kind) for name, kind in content["columns"]),
            root=content["root"],
        )

    def to_json(self) -> str:
        return _canonical(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
