"""Which rows, in what order: a pure function of (data set, seed, settings). Pure.

For each epoch the row groups are permuted and laid on a line; the line is cut into one segment a logical
shard, each segment into windows, and the rows of a window are shuffled. A step takes the next
`rows_per_shard` rows of every shard's segment. Who computes a shard plays no part, so no resize can change,
lose or repeat a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from worldline.data import permute
from worldline.data.manifest import DataError, IntArray, Manifest

VERSION = 1


class WindowKey(NamedTuple):
    """A window, counted within its logical shard and epoch."""

    epoch: int
    shard: int
    window: int


class Need(NamedTuple):
    """A window's place in the order of need: sorts as the windows are first needed, over all shards."""

    epoch: int
    window: int
    shard: int

    @property
    def key(self) -> WindowKey:
        return WindowKey(self.epoch, self.shard, self.window)

    @classmethod
    def of(cls, key: WindowKey) -> Self:
        return cls(key.epoch, key.window, key.shard)


class Piece(NamedTuple):
    """Rows [start, stop) of a row group of a file; first_row_id is the id of row `start`."""

    file: int
    row_group: int
    start: int
    stop: int
    first_row_id: int


@dataclass(frozen=True)
class Window:
    """Some thousand rows, read and shuffled as one unit. order_key: None leaves them in file order."""

    key: WindowKey
    pieces: tuple[Piece, ...]
    order_key: int | None

    @property
    def num_rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def order(self) -> IntArray:
        """Position in the pieces, laid one behind the other, of each row of the window."""
        if self.order_key is None:
            return np.arange(self.num_rows, dtype=np.int64)
        return permute.permutation(self.order_key, self.num_rows)

    @property
    def row_ids(self) -> IntArray:
        """Ids of the window's rows in shuffled order, as planned."""
        parts = [np.arange(p.first_row_id, p.first_row_id + p.stop - p.start) for p in self.pieces]
        return np.concatenate(parts).astype(np.int64, copy=False)[self.order]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One epoch's row groups in order: groups[j] covers the line from starts[j] to starts[j + 1]."""

    groups: IntArray
    starts: IntArray


@dataclass(frozen=True)
class Plan:
    """The order of samples of a run.

    Steps count from 1, epochs from 0. rows_per_shard: rows of a shard in one whole step. allow_short: accept
    a data set smaller than one global batch, as for validation, where one pass is the steps of epoch 0.
    transform, transform_digest: name and source digest of the user's transform; they only enter the
    fingerprint.

    Nothing here takes time or memory in proportion to the number of rows; an epoch costs one permutation of
    the row groups, of which the last two are kept.
    """

    manifest: Manifest
    _: KW_ONLY
    seed: int
    num_shards: int
    rows_per_shard: int
    window_rows: int
    shuffle: bool = True
    transform: str | None = None
    transform_digest: str = ""
    allow_short: bool = False

    def __post_init__(self) -> None:
        rows, step_rows = self.manifest.num_rows, self.num_shards * self.rows_per_shard
        if rows == 0:
            raise DataError(f"the data set under {self.manifest.root} has no rows")
        if rows < step_rows and not self.allow_short:
            raise DataError(
                f"the data set under {self.manifest.root} has {rows} rows, but one step needs {step_rows} "
                f"({self.num_shards} logical shards of {self.rows_per_shard} rows): lower "
                "batch.rows_per_shard, batch.accumulate or batch.logical_shards, or add data"
            )

    # Steps

    @cached_property
    def steps_per_epoch(self) -> int:
        return _ceil_div(self.segment(0)[1], self.rows_per_shard)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, index of the step in its epoch), both from 0."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return divmod(step - 1, self.steps_per_epoch)

    def rows_in_step(self, step: int, shard: int) -> int:
        start, stop = self._step_slice(step, shard)
        return stop - start

    def step_rows(self, step: int) -> tuple[int, ...]:
        """Rows of each shard in this step; fewer, maybe none, in the last step of an epoch."""
        return tuple(self.rows_in_step(step, shard) for shard in range(self.num_shards))

    def window_span(self, step: int, shard: int) -> list[tuple[int, int, int]]:
        """The step's rows of a shard as slices of shuffled windows: (window index, start, stop)."""
        start, stop = self._step_slice(step, shard)
        span = []
        while start < stop:
            index, offset = divmod(start, self.window_rows)
            end = min(stop, (index + 1) * self.window_rows)
            span.append((index, offset, offset + end - start))
            start = end
        return span

    def _step_slice(self, step: int, shard: int) -> tuple[int, int]:
        """Rows [start, stop) of the shard's segment that this step takes."""
        first, last = self.segment(shard)
        start = self.locate(step)[1] * self.rows_per_shard
        return min(start, last - first), min(start + self.rows_per_shard, last - first)

    # Windows

    def segment(self, shard: int) -> tuple[int, int]:
        """The part [start, stop) of an epoch's line that belongs to a shard."""
        size, larger = divmod(self.manifest.num_rows, self.num_shards)
        start = shard * size + min(shard, larger)
        return start, start + size + (shard < larger)

    def num_windows(self, shard: int) -> int:
        start, stop = self.segment(shard)
        return _ceil_div(stop - start, self.window_rows)

    def windows(self, epoch: int, shard: int) -> Iterator[Window]:
        return (self.window(epoch, shard, index) for index in range(self.num_windows(shard)))

    def window(self, epoch: int, shard: int, index: int) -> Window:
        first, last = self.segment(shard)
        start = first + index * self.window_rows
        stop = min(start + self.window_rows, last)
        if index < 0 or start >= stop:
            raise IndexError(f"shard {shard} has {self.num_windows(shard)} windows, no window {index}")
        order_key = permute.derive_key("window", self.seed, epoch, shard, index) if self.shuffle else None
        pieces = self._cut(self._line(epoch), start, stop)
        return Window(WindowKey(epoch, shard, index), tuple(pieces), order_key)

    def first_need(self, step: int) -> Need:
        """Where the order of need begins for a run that goes on with `step`."""
        epoch, index = self.locate(step)
        return Need(epoch, index * self.rows_per_shard // self.window_rows, 0)

    def needs(self, start: Need, last_step: int) -> Iterator[Need]:
        """Every window from `start` to the end of `last_step`, in the order steps first need them."""
        last_epoch, last_index = self.locate(last_step)
        lengths = [stop - first for first, stop in map(self.segment, range(self.num_shards))]
        for epoch in range(start.epoch, last_epoch + 1):
            end = (last_index + 1) * self.rows_per_shard if epoch == last_epoch else lengths[0]
            for index in range(start.window if epoch == start.epoch else 0, self.num_windows(0)):
                for shard, length in enumerate(lengths):
                    need = Need(epoch, index, shard)
                    if index * self.window_rows < min(end, length) and need >= start:
                        yield need

    @cached_property
    def _lines(self) -> dict[int, _Line]:
        return {}

    def _line(self, epoch: int) -> _Line:
        line = self._lines.get(epoch)
        if line is None:
            rows = self.manifest.group_rows
            if self.shuffle:
                groups = permute.permutation(permute.derive_key("groups", self.seed, epoch), len(rows))
            else:
                groups = np.arange(len(rows), dtype=np.int64)
            starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows[groups])])
            line = _Line(groups=groups, starts=starts)
            # Around the border of an epoch two are in use.
            for old in sorted(self._lines)[:-1]:
                self._lines.pop(old, None)
            self._lines[epoch] = line
        return line

    def _cut(self, line: _Line, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of row groups that lie on [start, stop) of the line."""
        place = int(np.searchsorted(line.starts, start, side="right")) - 1
        while start < stop:
            group, group_start = int(line.groups[place]), int(line.starts[place])
            end = min(stop, int(line.starts[place + 1]))
            if start < end:
                file, row_group = self.manifest.locate_group(group)
                first_row_id = int(self.manifest.group_first_row[group]) + start - group_start
                yield Piece(file, row_group, start - group_start, end - group_start, first_row_id)
                start = end
            place += 1

    # Identity

    @cached_property
    def fingerprint(self) -> str:
        """Changes with all that decides which rows a step sees and what the transform makes of them."""
        content = self._settings() | {
            "manifest": self.manifest.digest,
            "versions": {"plan": VERSION, "permutation": permute.VERSION},
        }
        del content["allow_short"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "manifest"}

    def to_json(self) -> str:
        return json.dumps(self._settings() | {"manifest": self.manifest.to_dict()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        content = json.loads(text)
        return cls(Manifest.from_dict(content.pop("manifest")), **content)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
