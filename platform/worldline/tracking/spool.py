"""What waits to be sent: the run's own logs, read as they grow. Nothing is kept that they do not hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from worldline.tracking.jsonl import Follower
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, event_of
from worldline.tracking.points import Point, Points


class Batch(NamedTuple):
    """Points to be sent together. through: all steps up to this one are in this batch or in those before."""

    points: list[Point]
    through: int


class Spool:
    """The logs of a run as batches of points.

    Protocol: `read` takes in what was appended since; `take` gives the oldest batch without removing it, or
    None; with `full` only one that has no room left. `taken` removes it. A log that was replaced, as by a
    rollback, is read again from its start, and so are the others: the receiver knows what it has.
    """

    def __init__(self, run_dir: Path, limit: int = 1000) -> None:
        self.run_dir = run_dir
        self._limit = limit
        self._begin()

    def _begin(self) -> None:
        self._steps = Follower(self.run_dir / STEPS)
        self._evaluations = Follower(self.run_dir / EVALUATIONS)
        self._events = Follower(self.run_dir / EVENTS)
        self._points = Points()
        self._batches: list[Batch] = []

    def read(self) -> bool:
        """Take in what is new, a bounded part at a time. False where there was nothing."""
        if len(self._batches) > 16:  # what is not sent stays in the files
            return False
        events, evaluations = list(_all(self._events)), list(_all(self._evaluations))
        steps = self._steps.read()
        if self._steps.restarted or self._evaluations.restarted:
            self._begin()
            return True
        for event in events:
            self._points.event(event_of(event))
        for evaluation in evaluations:
            self._points.evaluation(evaluation)
        for fields in steps:
            self._add(self._points.step(fields), int(fields["step"]))
        return bool(steps or evaluations)

    def close(self) -> None:
        """Nothing more will be written: what still waits for a later step goes into the last batch."""
        through = self._batches[-1].through if self._batches else 0
        self._add(self._points.rest(), through)

    def take(self, full: bool = False) -> Batch | None:
        if not self._batches or (full and len(self._batches) == 1):
            return None
        return self._batches[0]

    def taken(self) -> None:
        del self._batches[0]

    @property
    def num_incidents(self) -> int:
        return self._points.num_incidents

    def _add(self, points: list[Point], through: int) -> None:
        for start in range(0, len(points), self._limit):  # one step seldom has more than a batch holds
            part = points[start : start + self._limit]
            done = through if start + self._limit >= len(points) else through - 1
            last = self._batches[-1] if self._batches else None
            if last is not None and len(last.points) + len(part) <= self._limit:
                self._batches[-1] = Batch(last.points + part, done)
            else:
                self._batches.append(Batch(part, done))


def _all(follower: Follower) -> Iterator[dict[str, object]]:
    while lines := follower.read():
        yield from lines
