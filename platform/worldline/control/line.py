"""The line of completed steps as the controller knows it: each step once, in order, whoever reported it."""

from __future__ import annotations

from collections.abc import Iterable

from worldline.events import StepRecord
from worldline.tracking.log import StepLog


class Line:
    """Feeds the step log.

    Records may come from several workers, more than once and, around a change of the world, with a gap: the
    rank that told of the steps died with some untold. Those behind the gap are kept until any member fills
    it.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._early: dict[int, StepRecord] = {}
        self.newest: StepRecord | None = None

    @property
    def last_step(self) -> int:
        return self._log.last_step

    def offer(self, records: Iterable[StepRecord]) -> list[StepRecord]:
        """Write what follows the last step; returns what was written."""
        for record in records:
            if record.step > self.last_step:
                self._early.setdefault(record.step, record)
        ready = []
        step = self.last_step + 1
        while step in self._early:
            ready.append(self._early.pop(step))
            step += 1
        if ready:
            self._log.append(ready)
            self.newest = ready[-1]
        return ready

    def lacks(self, step: int) -> bool:
        """Whether a step up to `step` has not been reported yet, or one before those that were."""
        return self.last_step < max([step, *self._early])

    def rewind(self, step: int) -> None:
        """The line goes on after `step`: later steps are done again."""
        self._early.clear()
        self._log.truncate(step)
