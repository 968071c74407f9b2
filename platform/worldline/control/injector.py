"""Carries out a fault script's faults: the only part of it that does anything."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

from worldline.control.chaos import Kind
from worldline.control.schedule import Fault, Schedule
from worldline.control.signals import Answer, DrainRequested, Post, Resize

BY = "the fault script"


class Injector:
    """Protocol: `strike` at each pass of the controller's loop, in its thread; it never blocks.

    harm: has a worker send itself a signal: id, number, seconds until SIGCONT. post: drains and resizes come
    to the controller as those of an operator. note: writes a fault, and to which workers, to the run's log.
    """

    def __init__(
        self,
        schedule: Schedule,
        harm: Callable[[str, int, float | None], None],
        post: Post,
        note: Callable[[str, Sequence[str]], None],
    ) -> None:
        self._schedule = schedule
        self._harm = harm
        self._post = post
        self._note = note

    def strike(self, step: int, now: float, ranks: Mapping[int, str], wanted: int) -> None:
        """See `Schedule.due`."""
        for fault in self._schedule.due(step, now, ranks, wanted):
            self._note(str(fault), [fault.worker] if fault.worker else [])
            if fault.missed:
                continue
            wanted += fault.num
            match fault.kind:
                case Kind.KILL:
                    self._harm(fault.worker, signal.SIGKILL, None)
                case Kind.STOP:
                    self._harm(fault.worker, signal.SIGSTOP, fault.resume_s)
                case Kind.DRAIN:
                    self._post(DrainRequested(fault.worker, fault.lead_s, BY, self._answer(fault)))
                case Kind.ADD | Kind.REMOVE:
                    self._post(Resize(wanted, BY, self._answer(fault)))

    def _answer(self, fault: Fault) -> Answer:
        def answer(accepted: bool, sentence: str) -> None:
            if not accepted:
                self._note(f"{fault} is refused: {sentence}", [fault.worker] if fault.worker else [])

        return answer
