"""Whether a run trained every row once: its step log, held against the plan's own row ids. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldline.data.ledger import rows_digest, step_digest
from worldline.data.manifest import IntArray
from worldline.data.plan import Plan, WindowKey

MAX_FAULTS = 20

Step = Mapping[str, Any]


@dataclass(frozen=True)
class EpochRows:
    """rows: how many of the epoch's rows its steps trained. complete: all its steps are in the log."""

    epoch: int
    steps: int
    rows: int
    complete: bool


@dataclass(frozen=True)
class Audit:
    """faults: what is not as the plan demands, the first `MAX_FAULTS`; empty if every row was trained once.

    num_skipped: steps that saw their rows but left the update out because it was not finite.
    """

    num_steps: int
    num_skipped: int
    epochs: tuple[EpochRows, ...]
    faults: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(epoch.rows for epoch in self.epochs)


def audit(plan: Plan, steps: Iterable[Step]) -> Audit:
    """Hold each step's digest of row ids against the one that the plan demands, and count the rows.

    The row ids of a step whose digest is right are known, so each row of an epoch can be counted one by one:
    none may come twice, and all must have come when the epoch is complete. The log must hold step 1 and each
    one after it once: what is missing proves nothing.
    """
    books = _Books(plan)
    for step in steps:
        books.enter(step)
    return books.close()


def shard_rows(plan: Plan, step: int, shard: int, windows: dict[WindowKey, IntArray]) -> IntArray:
    """Row ids of a shard in a step, in order. windows: those of earlier calls, of which the last are kept."""
    epoch, _ = plan.locate(step)
    parts = [np.empty(0, dtype=np.int64)]
    for index, start, stop in plan.window_span(step, shard):
        key = WindowKey(epoch, shard, index)
        if key not in windows:
            windows[key] = plan.window(*key).row_ids
            while len(windows) > 2 * plan.num_shards:
                del windows[next(iter(windows))]
        parts.append(windows[key][start:stop])
    return np.concatenate(parts)


def planned_digest(plan: Plan, step: int) -> str:
    """The `rows_digest` that the record of this step must have."""
    return _digest([shard_rows(plan, step, shard, {}) for shard in range(plan.num_shards)])


class _Books:
    """The accounts of the epoch under way, and what came out of those before it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._windows: dict[WindowKey, IntArray] = {}
        self._epochs: list[EpochRows] = []
        self._faults: list[str] = []
        self._last = 0
        self._num_steps = 0
        self._num_skipped = 0
        self._open(0)

    def enter(self, step: Step) -> None:
        number = int(step["step"])
        if number <= self._last:
            self._faults.append(f"step {number} comes again after step {self._last}")
            return
        if number > self._last + 1:
            first, last = self._last + 1, number - 1
            what = f"step {first} is" if first == last else f"steps {first} to {last} are"
            self._faults.append(f"{what} missing in the log")
        self._last = number
        self._num_steps += 1
        self._num_skipped += bool(step.get("skipped"))
        epoch, _ = self._plan.locate(number)
        if epoch != self._epoch:
            self._settle()
            self._open(epoch)
        self._steps += 1
        self._count(number, step)

    def close(self) -> Audit:
        self._settle()
        faults = tuple(self._faults[:MAX_FAULTS])
        return Audit(self._num_steps, self._num_skipped, tuple(self._epochs), faults)

    def _open(self, epoch: int) -> None:
        self._epoch = epoch
        self._steps = 0
        self._seen = np.zeros(self._plan.manifest.num_rows, dtype=np.bool_)

    def _count(self, number: int, step: Step) -> None:
        shards = [
            shard_rows(self._plan, number, shard, self._windows) for shard in range(self._plan.num_shards)
        ]
        demanded = _digest(shards)
        if step["rows_digest"] != demanded:
            self._faults.append(
                f"step {number} trained other rows than the plan demands: "
                f"their digest is {step['rows_digest']}, not {demanded}"
            )
            return
        rows = np.concatenate(shards)
        if step["rows"] != len(rows):
            self._faults.append(f"step {number} counts {step['rows']} rows, the plan {len(rows)}")
        again = int(self._seen[rows].sum()) + len(rows) - len(np.unique(rows))
        if again:
            self._faults.append(f"step {number} repeats {again} rows of epoch {self._epoch}")
        self._seen[rows] = True

    def _settle(self) -> None:
        if not self._steps:
            return
        rows = int(self._seen.sum())
        complete = self._steps == self._plan.steps_per_epoch
        if complete and rows < len(self._seen):
            self._faults.append(f"epoch {self._epoch} is complete but lacks {len(self._seen) - rows} rows")
        self._epochs.append(EpochRows(self._epoch, self._steps, rows, complete))


def _digest(shards: list[IntArray]) -> str:
    table = np.zeros((len(shards), 2), dtype=np.int64)
    for shard, rows in enumerate(shards):
        if len(rows):
            table[shard] = len(rows), np.uint64(rows_digest(rows)).astype(np.int64)
    return step_digest(table)
