"""The line of completed steps as the controller knows it: each step once, in order, whoever reported it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from worldline.events import StepRecord
from worldline.tracking.log import StepLog

RECENT = 50


class Line:
    """Feeds the step log.

    Records may come from several workers, more than once and, around a change of the world, with a gap: the
    rank that told of the steps died with some untold. Those behind the gap are kept until any member fills
    it. After `rewind`, what older generations did beyond that step is refused.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._early: dict[int, StepRecord] = {}
        self._rewound_to = 0
        self._refused = 0
        self._recent_s: deque[float] = deque(maxlen=RECENT)

    @property
    def last_step(self) -> int:
        return self._log.last_step

    def offer(self, records: Iterable[StepRecord]) -> list[StepRecord]:
        """Write what follows the last step; returns what was written."""
        for record in records:
            old = record.step > self._rewound_to and record.generation <= self._refused
            if record.step > self.last_step and not old:
                self._early.setdefault(record.step, record)
        ready = []
        step = self.last_step + 1
        while step in self._early:
            ready.append(self._early.pop(step))
            step += 1
        if ready:
            self._log.append(ready)
            self._recent_s.extend(record.step_s for record in ready)
        return ready

    @property
    def recent_s(self) -> Sequence[float]:
        """Seconds that the last steps took."""
        return self._recent_s

    @property
    def newest(self) -> int:
        """The newest step reported, there or kept."""
        return max([self.last_step, *self._early])

    def lacks(self, step: int) -> bool:
        """Whether a step up to `step` has not been reported yet, or one before those that were."""
        return self.last_step < max(step, self.newest)

    def rewind(self, step: int, generation: int) -> None:
        """The line goes on after `step`: what was done later, up to this generation, is done again."""
        self._early = {s: record for s, record in self._early.items() if s <= step}
        self._rewound_to, self._refused = step, generation
        if self.last_step > step:
            self._log.truncate(step)

    def pass_over(self, step: int) -> tuple[int, int]:
        """Give up the gap before the steps that are kept or, if none are, up to `step`. Returns its ends."""
        gap = self.last_step + 1, min(self._early, default=step + 1) - 1
        self._log.truncate(gap[1])
        return gap
