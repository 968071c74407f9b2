"""What a worker has to say, kept until the controller fetches it, off the step path."""

from __future__ import annotations

import threading
from collections import deque

from worldline.events import StepRecord
from worldline.worker.orders import Report

KEPT_STEPS = 4096


class Mailbox:
    """Filled by the training thread, emptied by long polls.

    Every worker keeps its last step records, but only one that is told to (`narrate`) also posts them: the
    records are the same on all, and if the narrator dies any other can say what it had not said yet.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: deque[Report] = deque()
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._narrates = False

    def narrate(self, on: bool) -> None:
        with self._changed:
            self._narrates = on

    def post(self, report: Report) -> None:
        with self._changed:
            self._items.append(report)
            self._changed.notify()

    def post_step(self, record: StepRecord) -> None:
        with self._changed:
            self._steps.append(record)
            if self._narrates:
                self._items.append(record)
                self._changed.notify()

    def forget_after(self, step: int) -> None:
        """The line goes on from `step`: what was completed beyond is lost and will be done again."""
        with self._changed:
            self._steps = deque((r for r in self._steps if r.step <= step), maxlen=KEPT_STEPS)
            self._items = deque(r for r in self._items if not isinstance(r, StepRecord) or r.step <= step)

    def fetch(self, wait_s: float) -> tuple[Report, ...]:
        """Everything posted since the last call; waits up to `wait_s` for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._items, wait_s)
            items = tuple(self._items)
            self._items.clear()
            return items

    def steps_after(self, step: int) -> tuple[StepRecord, ...]:
        with self._changed:
            return tuple(record for record in self._steps if record.step > step)
