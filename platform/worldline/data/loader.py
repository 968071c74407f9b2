"""From windows to the micro-batches of a step, reading ahead in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worldline.data.block import Block, Columns
from worldline.data.manifest import DataError, IntArray
from worldline.data.plan import Need, Plan, WindowKey
from worldline.data.reader import WindowSource, check_rows

Column = torch.Tensor | npt.NDArray[Any]


LOOK_UP_S = 0.05


class ReadCancelled(Exception):
    """The wait for rows was given up on order; the rows come to whoever asks again."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of one shard and step. The columns are the caller's own: it may change them."""

    columns: dict[str, Column]
    row_ids: IntArray

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)


class Loader:
    """Hands out the rows of (step, shard), whatever was asked before.

    Protocol: `focus(shards, step)` says which shards this replica computes from now on and where it stands;
    from then on a thread reads the windows these steps need, and the next ones, in the order of need.
    `batches(step, shard)` waits for them. Both come from one thread. `expect(shards, step)`, from any thread,
    has these read, too, until the next focus. A focus may change at any time and to
    anything, steps may be asked again or passed over: only the waiting changes, never the rows. Windows that
    the new focus still needs are kept. What is read ahead counts for nothing: there is no position to save
    but the step.

    plan, source: must belong together. micro_rows: rows of a micro-batch at most. prefetch: windows of each
    shard read ahead beyond those of its step. last_step: read nothing ahead that only later steps need.
    timeout_s: how long a window may take.
    """

    def __init__(
        self,
        plan: Plan,
        source: WindowSource,
        micro_rows: int,
        prefetch: int = 1,
        *,
        last_step: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._plan = plan
        self._source = source
        self._micro_rows = micro_rows
        self._prefetch = prefetch
        self._last_step = last_step
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._wanted: dict[int, list[WindowKey]] = {}
        self._expected: dict[int, list[WindowKey]] = {}
        self._held: dict[WindowKey, Block] = {}
        # Windows whose reading failed: tried again when asked for once more after that was raised, or by a
        # new focus.
        self._failed: dict[WindowKey, Exception] = {}
        self._raised: set[WindowKey] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._read_ahead, name="worldline-loader", daemon=True)
        self._thread.start()

    def focus(self, shards: range, step: int) -> None:
        """From now on these shards are wanted, beginning with `step`."""
        wanted = {shard: self._keys(step, shard) for shard in shards}
        with self._changed:
            self._wanted, self._expected = wanted, {}
            self._failed.clear()
            self._raised.clear()
            self._forget()
            self._changed.notify_all()

    def expect(self, shards: range, step: int) -> None:
        """These shards will soon be wanted, from about `step` on, and no others."""
        expected = {shard: self._keys(step, shard) for shard in shards}
        with self._changed:
            self._expected = expected
            self._forget()
            self._changed.notify_all()

    def batches(
        self,
        step: int,
        shard: int,
        timeout_s: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[MicroBatch]:
        """The shard's rows of this step, cut into micro-batches of at most `micro_rows` rows.

        The last may be short; where the shard has no rows in this step there is none.
        Waits until they are there, at most `timeout_s` (by default the loader's). Raises DataError, or what
        the source raised, or ReadCancelled once `cancelled` says so.
        """
        epoch, _ = self._plan.locate(step)
        span = self._plan.window_span(step, shard)
        parts = []
        for index, start, stop in span:
            block = self._wait(WindowKey(epoch, shard, index), step, timeout_s or self._timeout_s, cancelled)
            columns = {name: values[start:stop] for name, values in block.columns.items()}
            parts.append((columns, block.row_ids[start:stop]))
        if not parts:
            return []
        columns, row_ids = parts[0] if len(parts) == 1 else _join(parts)
        cuts = range(0, len(row_ids), self._micro_rows)
        return [micro_batch(columns, row_ids, cut, cut + self._micro_rows) for cut in cuts]

    def close(self) -> None:
        """End the thread, once its read has come to an end, and let go of all windows."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._expected.clear()
            self._held.clear()
            self._changed.notify_all()
        self._thread.join(timeout=5)

    def _wait(self, key: WindowKey, step: int, timeout_s: float, cancelled: Callable[[], bool]) -> Block:
        """The window, when it is held. Moves the shard on to this step first if it stands elsewhere."""
        with self._changed:
            wanted = self._wanted.get(key.shard)
            # Most steps stay within the shard's first window: they cost a look-up.
            if wanted is None or key != wanted[0]:
                keys = self._keys(step, key.shard)
                if keys != wanted:
                    self._wanted[key.shard] = keys
                    self._forget()
                    self._changed.notify_all()
            if key in self._raised:
                self._raised.remove(key)
                self._failed.pop(key, None)
                self._changed.notify_all()
            arrived = self._wait_until(
                lambda: key in self._held or key in self._failed or self._closed, timeout_s, cancelled
            )
            if self._closed:
                raise DataError("the loader is closed")
            if not arrived:
                raise DataError(f"{self._describe(key)} did not come within {timeout_s:g} s")
            if key in self._held:
                return self._held[key]
            self._raised.add(key)
            raise self._failed[key]

    def _wait_until(
        self, arrived: Callable[[], bool], timeout_s: float, cancelled: Callable[[], bool]
    ) -> bool:
        """Whether it came before the deadline; looks at `cancelled` meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not self._changed.wait_for(arrived, min(LOOK_UP_S, deadline - time.monotonic())):
            if cancelled():
                raise ReadCancelled("gave up waiting for rows on order")
            if time.monotonic() >= deadline:
                return False
        return True

    def _keys(self, step: int, shard: int) -> list[WindowKey]:
        """The shard's windows of this step and the next `prefetch` ones, over the border of the epoch."""
        epoch, _ = self._plan.locate(step)
        num_windows = self._plan.num_windows(shard)
        if num_windows == 0:
            return []
        span = self._plan.window_span(step, shard)
        # A shard without rows in the epoch's last step goes on with the next epoch.
        first = span[0][0] if span else num_windows
        count = len(span) + self._prefetch
        keys = [
            WindowKey(epoch + i // num_windows, shard, i % num_windows) for i in range(first, first + count)
        ]
        return keys[: len(span)] + [key for key in keys[len(span) :] if self._is_ever_needed(key)]

    def _is_ever_needed(self, key: WindowKey) -> bool:
        if self._last_step is None:
            return True
        epoch, index = self._plan.locate(self._last_step)
        stop = (index + 1) * self._plan.rows_per_shard
        return (key.epoch, key.window * self._plan.window_rows) < (epoch, stop)

    def _forget(self) -> None:
        """Let go of the windows nobody wants any more."""
        for key in self._held.keys() - set(self._all_wanted()):
            del self._held[key]

    def _all_wanted(self) -> Iterator[WindowKey]:
        return chain(*self._wanted.values(), *self._expected.values())

    def _next(self) -> WindowKey | None:
        """The wanted window that is needed first and not there."""
        missing = (key for key in self._all_wanted() if key not in self._held and key not in self._failed)
        return min(missing, key=Need.of, default=None)

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                key = self._next()
                if self._closed or key is None:
                    return
            try:
                block = self._source.fetch(key, self._timeout_s)
                check_rows(block, self._plan.window(*key))
            except Exception as error:
                outcome: Block | Exception = error
            else:
                outcome = block
            with self._changed:
                if key in self._all_wanted():
                    if isinstance(outcome, Block):
                        self._held[key] = outcome
                    else:
                        self._failed[key] = outcome
                    self._changed.notify_all()

    def _describe(self, key: WindowKey) -> str:
        files = self._plan.manifest.files
        names = sorted({files[piece.file].path for piece in self._plan.window(*key).pieces})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"window {key.window} of shard {key.shard} (epoch {key.epoch}, from {', '.join(names[:3])}{more})"
        )


def micro_batch(columns: Columns, row_ids: IntArray, start: int, stop: int) -> MicroBatch:
    """Rows [start, stop) of those given."""
    # Copies: a task may change its batch in place, and a step may have to be done again.
    rows = {name: _column(values[start:stop].copy()) for name, values in columns.items()}
    return MicroBatch(rows, row_ids[start:stop].copy())


def _column(values: npt.NDArray[Any]) -> Column:
    return torch.from_numpy(values) if values.dtype.kind in "biuf" else values


def _join(
    parts: list[tuple[dict[str, npt.NDArray[Any]], IntArray]],
) -> tuple[dict[str, npt.NDArray[Any]], IntArray]:
    columns = {name: _concatenate([columns[name] for columns, _ in parts]) for name in parts[0][0]}
    return columns, np.concatenate([row_ids for _, row_ids in parts])


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if all(part.dtype == parts[0].dtype and part.shape[1:] == parts[0].shape[1:] for part in parts):
        return np.concatenate(parts)
    # Lists of one length in each window, but not the same one: rows become objects.
    rows = np.empty(sum(map(len, parts)), dtype=object)
    rows[:] = [row for part in parts for row in part]
    return rows
