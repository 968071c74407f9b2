"""What is known: signals come in, membership and budgets change."""

from __future__ import annotations

from collections.abc import Callable

from worldline.control.budget import Budget, start_delay
from worldline.control.cluster import Cluster
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.membership import Membership, MemberState
from worldline.control.signals import (
    Ended,
    Fetched,
    LeaseLost,
    Lost,
    Ready,
    SaveEnded,
    Signal,
    Signals,
    StartFailed,
    StepsFetched,
    StopRequested,
)
from worldline.events import EventKind
from worldline.worker.orders import EndKind, GenerationEnd, Hello, Met

PULSE_S = 0.1


class Sensors:
    """Takes in signals. Decides nothing, orders nothing but the end of workers that are out.

    Protocol: `listen` whenever there is nothing to do at once; then read. `membership` and `budget` are
    values: who carries out a decision puts the changed one back. Once `lease_lost` is set nothing is taken in
    any more, as nothing may be written any more.
    """

    def __init__(
        self,
        signals: Signals,
        cluster: Cluster,
        intake: Intake,
        journal: Journal,
        budget: Budget,
        refuse: Callable[[Hello], str],
        clock: Callable[[], float],
    ) -> None:
        self.membership = Membership()
        self.budget = budget
        self.stop: StopRequested | None = None
        self.lease_lost = ""
        self.last_save: SaveEnded | None = None
        self.last_failure = ""
        """Why the newest worker that did not become ready did not; empty after one did."""
        self.request_from = 0.0
        """No worker is to be requested before this time."""
        self._signals = signals
        self._cluster = cluster
        self._intake = intake
        self._journal = journal
        self._refuse = refuse
        self._clock = clock
        self._start_failures = 0
        self._anybody_was_ready = False
        self._tracebacks: set[str] = set()

    def listen(self, until: float) -> None:
        """Take in all signals that are there, after waiting for one until then or the next pulse."""
        now = self._clock()
        self._intake.poll(self.membership, now)
        signal = self._signals.next(min(until - now, PULSE_S))
        while signal is not None and not self.lease_lost:
            self._sense(signal, self._clock())
            signal = self._signals.next(0)
        self._journal.refresh(self.membership, self._intake.progress)

    def lose(self, id: str, reason: str) -> None:
        """The worker is out, whatever it was."""
        member = self.membership.members.get(id)
        if member is None:
            return
        if member.state is MemberState.REQUESTED:
            self._start_failed(id, reason)
            return
        self._drop(id, reason)
        was_member = member.state is MemberState.MEMBER
        self._journal.event(
            EventKind.WORKER_LOST,
            f"rank {member.rank} {reason}" if was_member else f"standby {reason}",
            workers=[id],
            world=len(self.membership.current) if was_member else None,
        )

    def _sense(self, signal: Signal, now: float) -> None:
        match signal:
            case Ready():
                self._welcome(signal, now)
            case StartFailed():
                self._cannot_start(signal.id, signal.reason)
            case Lost():
                self.lose(signal.id, signal.reason)
            case Ended():
                self._generation_ended(signal.id, signal.end)
            case Fetched():
                if signal.reports is not None:
                    self.membership = self.membership.heard(signal.id, now)
                    for item in signal.reports.items:
                        if isinstance(item, Met):
                            self.membership = self.membership.met(signal.id, item)
                self._intake.fetched(signal, self.membership.members.get(signal.id), now)
            case StepsFetched():
                self._intake.steps_fetched(signal, self.membership.members.get(signal.id))
            case SaveEnded():
                self._saved(signal)
            case StopRequested():
                self.stop = self.stop or signal
                self._journal.event(EventKind.STOP_REQUESTED, signal.reason)
            case LeaseLost():
                self.lease_lost = signal.reason
                self._journal.mute()

    def _welcome(self, signal: Ready, now: float) -> None:
        refusal = self._refuse(signal.hello)
        if refusal:
            self._cannot_start(signal.id, refusal)
            return
        self._anybody_was_ready = True
        self._start_failures, self.last_failure = 0, ""
        self.membership = self.membership.ready(signal.id, signal.hello, now)
        self._journal.event(EventKind.WORKER_READY, workers=[signal.id])

    def _cannot_start(self, id: str, reason: str) -> None:
        """Its preparation raised, or it was refused. The job is to blame, unless others became ready."""
        if not self._anybody_was_ready:
            self.budget = self.budget.after_start_error(reason)
        self._start_failed(id, reason)

    def _start_failed(self, id: str, reason: str) -> None:
        if id not in self.membership.members:
            return
        self._drop(id, reason)
        self._journal.event(EventKind.WORKER_START_FAILED, reason, workers=[id])
        self._start_failures += 1
        self.last_failure = reason
        self.request_from = self._clock() + start_delay(self._start_failures)

    def _drop(self, id: str, reason: str) -> None:
        self._cluster.kill(id)
        self._intake.forget(id)
        self.membership = self.membership.out(id, reason)

    def _generation_ended(self, id: str, end: GenerationEnd) -> None:
        member = self.membership.members.get(id)
        if member is None or end.generation != self.membership.generation:
            return
        self.membership = self.membership.ended(id, end)
        self.budget = self.budget.after_end(end, member.rank)
        if end.position is not None:
            self._intake.expect(end.position.step)
        if end.kind is EndKind.TASK_ERROR:
            text = f"rank {member.rank}: {end.reason}"
            if end.traceback not in self._tracebacks:
                self._tracebacks.add(end.traceback)
                text += f"\n{end.traceback}"
            self._journal.event(EventKind.TASK_ERROR, text, workers=[id])

    def _saved(self, signal: SaveEnded) -> None:
        self.last_save = signal
        if signal.error:
            self._journal.event(
                EventKind.CHECKPOINT_FAILED,
                f"step {signal.step}: {signal.error}; the checkpoints before it stay",
                seconds=signal.seconds,
            )
        else:
            self._journal.event(EventKind.CHECKPOINT_SAVED, f"step {signal.step}", seconds=signal.seconds)
