"""From storage to a window's rows, in this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from worldline.data.block import ROW_ID, Block, Transform, apply_transform, decode, plain_array
from worldline.data.manifest import DataError, IntArray, Manifest
from worldline.data.plan import Piece, Plan, Window, WindowKey
from worldline.data.scan import open_root
from worldline.data.schema import parse_type, plain_type
from worldline.data.transform import load_transform, transform_digest

__all__ = ["Block", "LocalSource", "WindowReader", "WindowSource", "load_transform", "transform_digest"]

_OPEN_FILES = 16


class WindowSource(Protocol):
    """Where a loader gets windows from. One thread at a time calls it.

    `fetch` returns the rows of the window in the plan's order, transformed, the same whatever was fetched
    before and from whichever source; it raises DataError when it cannot, at the latest after about
    `timeout_s`. The same window may be fetched again at any time.
    """

    def fetch(self, key: WindowKey, timeout_s: float) -> Block: ...


class WindowReader:
    """Reads windows from Parquet files. For one thread at a time.

    Decoded row groups are kept, the last used up to `cache_bytes`, since neighbouring windows share them.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        *,
        cache_bytes: int = 256 * 2**20,
    ) -> None:
        self._manifest = manifest
        self._types = dict(manifest.columns)
        self._columns = list(self._types if columns is None else columns)
        self._transform = transform
        self._filesystem, self._base = open_root(manifest.root)
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._cache_bytes = cache_bytes

    def read(self, window: Window) -> Block:
        """The window's rows in shuffled order, transformed."""
        block = decode(self.read_table(window))
        return block if self._transform is None else apply_transform(self._transform, block)

    def read_table(self, window: Window) -> pa.Table:
        """The window's rows in shuffled order, with their ids in column ROW_ID."""
        rows = pa.concat_tables([self._read_piece(piece) for piece in window.pieces])
        return rows.combine_chunks().take(plain_array(window.order)).combine_chunks()

    def _read_piece(self, piece: Piece) -> pa.Table:
        rows = self._read_group(piece.file, piece.row_group)
        return rows.slice(piece.start, piece.stop - piece.start)

    def _read_group(self, file: int, row_group: int) -> pa.Table:
        """A whole row group. Ids come from where its rows were found, not from the window that asked."""
        place = (file, row_group)
        if place in self._groups:
            self._groups.move_to_end(place)
            return self._groups[place]
        entry = self._manifest.files[file]
        where = f"{self._manifest.root.rstrip('/')}/{entry.path}, row group {row_group}"
        try:
            # The worker's threads are for the model: decode in this one.
            table = self._open(file).read_row_group(row_group, columns=self._columns, use_threads=False)
            table = self._cast(table, where)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot read {where}: {error}") from error
        first = self._manifest.first_row(file, row_group)
        ids = np.arange(first, first + table.num_rows, dtype=np.int64)
        table = table.append_column(ROW_ID, plain_array(ids))
        self._groups[place] = table
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > self._cache_bytes:
            self._groups.popitem(last=False)
        return table

    def _cast(self, table: pa.Table, where: str) -> pa.Table:
        """The one schema of the manifest, in the order of the columns asked for."""
        arrays = []
        for name in self._columns:
            array, kind = table[name], self._types[name]
            plain = plain_type(array.type)
            target = plain if str(plain) == kind else parse_type(kind)
            if target is None:
                raise DataError(f"column {name!r} is {plain} in {where}, but was {kind} when the run began")
            arrays.append(array.cast(target))
        return pa.table(arrays, names=self._columns)

    def _open(self, file: int) -> pq.ParquetFile:
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        entry = self._manifest.files[file]
        stream = self._filesystem.open_input_file(f"{self._base.rstrip('/')}/{entry.path}")
        opened = pq.ParquetFile(stream)
        groups = tuple(opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups))
        if (stream.size(), groups) != (entry.size, entry.row_groups):
            raise DataError(
                f"{self._manifest.root.rstrip('/')}/{entry.path} has changed since the run began: it has "
                f"{stream.size()} bytes and {sum(groups)} rows, not {entry.size} and {entry.num_rows}"
            )
        self._files[file] = opened
        if len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return opened


class LocalSource:
    """A WindowSource that reads in this process. The timeout is storage's own."""

    def __init__(self, reader: WindowReader, plan: Plan) -> None:
        self._reader = reader
        self._plan = plan

    def fetch(self, key: WindowKey, timeout_s: float) -> Block:
        return self._reader.read(self._plan.window(*key))


def check_rows(block: Block, window: Window) -> None:
    """Raise unless the block holds just the rows that the plan puts into the window, in its order."""
    planned: IntArray = window.row_ids
    if not np.array_equal(block.row_ids, planned):
        raise DataError(f"{window.key} was planned with {len(planned)} rows, but other rows came")
