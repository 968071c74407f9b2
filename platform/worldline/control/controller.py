"""The elastic controller: sense, decide, order, until the line is finished or cannot go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worldline.control import planner
from worldline.control.budget import Budget, start_delay
from worldline.control.cluster import Cluster
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.line import Line
from worldline.control.membership import Membership, MemberState
from worldline.control.planner import Abandon, Decision, Expel, Form, Halt, Limits, Over, Proceed, Wait
from worldline.control.restore import RestorePoint
from worldline.control.saves import Saves
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
from worldline.tracking.status import RunState
from worldline.worker.orders import EndKind, GenerationEnd, Hello
from worldline.world import Position

PULSE_S = 0.1
ANSWER_S = 30.0
SAVE_S = 600.0

FINISHED, FAILED, TRY_AGAIN = 0, 1, 75


@dataclass(frozen=True)
class Conclusion:
    """How the run ended for this driver."""

    state: RunState
    reason: str
    exit_code: int


@dataclass
class Parts:
    """What the controller works with; built once by the launcher."""

    cluster: Cluster
    signals: Signals
    line: Line
    saves: Saves
    intake: Intake
    journal: Journal
    limits: Limits
    restore: Callable[[], RestorePoint]
    """Finds where the line goes on if nobody holds its state."""
    refuse: Callable[[Hello], str]
    """Why a new worker may not take part, empty if it may."""
    budget: Budget
    clock: Callable[[], float] = field(default=time.monotonic)


class Controller:
    """Owns one attempt of a run.

    Every change of the world, be it a death, a join or a stop, goes the same way. Signals come in (`_sense`)
    and change the membership; the planner, a pure function, says the one next thing to do (`_act`): have a
    broken generation's members say where they are, halt a healthy one at a step border, or form the next
    generation from whoever is ready. The highest completed step among the survivors is the truth; those
    behind and those new get it from those who hold it. Only if nobody does, a checkpoint is read.
    """

    def __init__(self, parts: Parts) -> None:
        self._cluster = parts.cluster
        self._signals = parts.signals
        self._line = parts.line
        self._saves = parts.saves
        self._intake = parts.intake
        self._journal = parts.journal
        self._limits = parts.limits
        self._restore = parts.restore
        self._refuse = parts.refuse
        self._budget = parts.budget
        self._clock = parts.clock
        self._membership = Membership()
        self._stop: StopRequested | None = None
        self._lease_lost = ""
        self._below_min_since: float | None = None
        self._pause_since: float | None = None
        self._announced = 0
        self._lost_members = 0
        self._save_again = False
        self._start_failures = 0
        self._request_from = 0.0
        self._tracebacks: set[str] = set()
        self._last_save: SaveEnded | None = None

    def run(self) -> Conclusion:
        """Drive the run until it ends. All workers are gone when this returns."""
        try:
            self._journal.state(RunState.STARTING)
            return self._conclude(self._loop())
        finally:
            self._cluster.dismiss_all()

    def _loop(self) -> Conclusion:
        while True:
            now = self._clock()
            self._top_up(now)
            conclusion = self._verdict(now)
            if conclusion is not None:
                return conclusion
            decision = planner.decide(
                self._membership,
                self._limits,
                stopping=self._stop is not None,
                below_min_since=self._below_min_since or now,
                now=now,
            )
            if isinstance(decision, Over):
                return self._over()
            until = self._act(decision, now)
            if until is not None:
                self._listen(until)

    def _verdict(self, now: float) -> Conclusion | None:
        """Whether it is over, and how, where that does not depend on the plan."""
        if self._lease_lost:
            return Conclusion(RunState.STOPPED, self._lease_lost, TRY_AGAIN)
        if self._intake.drift and not self._budget.verdict:
            return Conclusion(RunState.FAILED, self._intake.drift, FAILED)
        if self._budget.verdict and not self._membership.training:
            return Conclusion(RunState.FAILED, self._budget.verdict, FAILED)
        ready = len(self._membership.members) - len(self._membership.in_state(MemberState.REQUESTED))
        if ready >= self._limits.min:
            self._below_min_since = None
        elif self._below_min_since is None:
            self._below_min_since = now
        return None

    # Sense

    def _listen(self, until: float) -> None:
        """Take in signals, all that are there, after waiting for one until then or the next pulse."""
        now = self._clock()
        self._intake.poll(self._membership, now)
        signal = self._signals.next(min(until - now, PULSE_S))
        while signal is not None:
            self._sense(signal)
            signal = self._signals.next(0)
        self._announce()
        self._journal.refresh(self._membership, self._intake.progress)

    def _sense(self, signal: Signal) -> None:
        now = self._clock()
        match signal:
            case Ready():
                self._welcome(signal, now)
            case StartFailed():
                self._start_failed(signal.id, signal.reason)
            case Lost():
                self._lose(signal.id, signal.reason)
            case Ended():
                self._generation_ended(signal.id, signal.end)
            case Fetched():
                member = self._membership.members.get(signal.id)
                self._intake.fetched(signal, member, now)
            case StepsFetched():
                self._intake.steps_fetched(signal)
            case SaveEnded():
                self._saved(signal)
            case StopRequested():
                self._stop = self._stop or signal
                self._journal.event(EventKind.STOP_REQUESTED, signal.reason)
            case LeaseLost():
                self._lease_lost = signal.reason

    def _welcome(self, signal: Ready, now: float) -> None:
        refusal = self._refuse(signal.hello)
        if refusal:
            self._start_failed(signal.id, refusal)
            return
        self._start_failures = 0
        self._membership = self._membership.ready(signal.id, signal.hello, now)
        self._journal.event(EventKind.WORKER_READY, workers=[signal.id])

    def _start_failed(self, id: str, reason: str) -> None:
        self._journal.event(EventKind.WORKER_START_FAILED, reason, workers=[id])
        if not self._membership.current:
            self._budget = self._budget.after_start_error(reason)
        self._drop(id, reason)
        self._cool()

    def _lose(self, id: str, reason: str) -> None:
        member = self._membership.members.get(id)
        if member is None:
            return
        if member.state is MemberState.REQUESTED:
            self._journal.event(EventKind.WORKER_START_FAILED, reason, workers=[id])
            self._drop(id, reason)
            self._cool()
            return
        was_member = member.state is MemberState.MEMBER
        self._lost_members += was_member
        self._drop(id, reason)
        self._journal.event(
            EventKind.WORKER_LOST,
            f"rank {member.rank} {reason}" if was_member else f"standby {reason}",
            workers=[id],
            world=len(self._membership.current) if was_member else None,
        )

    def _drop(self, id: str, reason: str) -> None:
        self._cluster.kill(id)
        self._intake.forget(id)
        self._membership = self._membership.lost(id, reason)

    def _cool(self) -> None:
        self._start_failures += 1
        self._request_from = self._clock() + start_delay(self._start_failures)

    def _generation_ended(self, id: str, end: GenerationEnd) -> None:
        member = self._membership.members.get(id)
        if member is None or end.generation != self._membership.generation:
            return
        self._membership = self._membership.ended(id, end)
        self._budget = self._budget.after_end(end, member.rank)
        if end.kind is EndKind.TASK_ERROR:
            text = f"rank {member.rank}: {end.reason}"
            if end.traceback not in self._tracebacks:
                self._tracebacks.add(end.traceback)
                text += f"\n{end.traceback}"
            self._journal.event(EventKind.TASK_ERROR, text, workers=[id])

    def _saved(self, signal: SaveEnded) -> None:
        self._last_save = signal
        if signal.error:
            self._journal.event(
                EventKind.CHECKPOINT_FAILED,
                f"step {signal.step}: {signal.error}; the checkpoints before it stay, training goes on",
                seconds=signal.seconds,
            )
        else:
            self._journal.event(EventKind.CHECKPOINT_SAVED, f"step {signal.step}", seconds=signal.seconds)

    def _announce(self) -> None:
        """Say it once when a new generation trains."""
        generation = self._membership.generation
        if self._intake.formed < generation or self._announced == generation:
            return
        self._announced = generation
        seconds = None if self._pause_since is None else self._clock() - self._pause_since
        self._pause_since = None
        current = self._membership.current
        self._journal.event(
            EventKind.GENERATION_FORMED,
            workers=[m.id for m in current],
            world=len(current),
            seconds=seconds,
        )
        self._journal.state(RunState.RUNNING)

    # Act

    def _act(self, decision: Decision, now: float) -> float | None:
        """Carry a decision out. Returns until when to listen, None to decide again at once."""
        match decision:
            case Proceed(until):
                return now + PULSE_S if until is None else until
            case Wait(reason, until):
                return self._wait(reason, until, now)
            case Abandon(ids):
                self._pause(now, RunState.RECOVERING, self._membership.trouble)
                for id in ids:
                    self._cluster.abandon(id, self._membership.generation)
                self._membership = self._membership.asked_to_abandon(ids, now)
            case Expel(ids, reason):
                for id in ids:
                    self._lose(id, reason)
            case Halt(ids):
                self._pause(now, RunState.DRAINING if self._stop else RunState.RUNNING, "")
                for id in ids:
                    self._cluster.halt(id, self._membership.generation)
                self._membership = self._membership.asked_to_halt()
            case Form():
                self._form(decision, now)
            case Over():
                raise AssertionError("the loop ends before")
        return None

    def _pause(self, now: float, state: RunState, reason: str) -> None:
        self._pause_since = self._pause_since or now
        self._journal.state(state, reason)

    def _wait(self, reason: str, until: float, now: float) -> float | None:
        waited = now >= until
        if waited:
            self._stop = StopRequested(f"{reason}; gave up after {self._limits.start_s:g} s", TRY_AGAIN)
            return None
        if self._membership.generation == 0:
            self._journal.state(RunState.STARTING, reason)
        elif self._journal.status.state is not RunState.WAITING:
            self._journal.event(EventKind.WAITING, reason)
            self._journal.state(RunState.WAITING, reason)
        return until

    def _form(self, form: Form, now: float) -> None:
        """Issue the next generation."""
        membership = self._membership
        broken = bool(membership.trouble)
        if broken and not self._lost_members:
            self._journal.event(EventKind.COLLECTIVE_FAILED, membership.trouble)
        self._lost_members = 0
        self._save_again |= self._saves.forget(membership.generation)
        point = RestorePoint(form.position) if form.position is not None else self._rewind()
        if membership.generation:
            self._budget = self._budget.after_generation(point.position.step, broken)
        if self._budget.verdict:
            return
        orders = planner.orders(
            form,
            membership.generation + 1,
            self._limits,
            position=point.position,
            restore=point.key,
            checkpoint=self._save_again,
        )
        self._save_again = False
        self._pause_since = self._pause_since or now
        self._membership = membership.formed(form.ids, now)
        self._journal.generation(self._membership.generation)
        for id, order in orders.items():
            self._cluster.train(id, order)
        self._intake.poll(self._membership, now)

    def _rewind(self) -> RestorePoint:
        """Nobody holds the state: go back to the newest checkpoint, or to the start."""
        point = self._restore()
        self._line.rewind(point.position.step)
        self._journal.rewound(point.position.step)
        if point.key is not None:
            self._journal.event(EventKind.RESTORED, point.key)
        return point

    def _top_up(self, now: float) -> None:
        """Keep as many workers asked for as are wanted; never while a generation is being put together."""
        if self._stop is not None or self._membership.trouble or now < self._request_from:
            return
        for _ in range(planner.missing(self._membership, self._limits)):
            id = self._cluster.request()
            self._membership = self._membership.requested(id, now)
            self._journal.event(EventKind.WORKER_REQUESTED, workers=[id])

    # End

    def _over(self) -> Conclusion:
        finished = [m for m in self._membership.current if m.end and m.end.kind is EndKind.FINISHED]
        if finished:
            return Conclusion(RunState.FINISHED, "", FINISHED)
        assert self._stop is not None
        return Conclusion(RunState.STOPPED, self._stop.reason, self._stop.exit_code)

    def _conclude(self, conclusion: Conclusion) -> Conclusion:
        """Bring home what the members still hold: untold steps, and the state where it is not durable."""
        held = [m.position for m in self._membership.current if m.position is not None]
        truth = max(held, default=None)
        if truth is None or self._lease_lost:
            return conclusion
        self._hear_out(truth)
        error = self._save(truth)
        if not error:
            return conclusion
        reason = f"{conclusion.reason or str(conclusion.state)}, but the state of step {truth.step} is not saved: {error}"
        return Conclusion(RunState.FAILED, reason, FAILED)

    def _hear_out(self, truth: Position) -> None:
        deadline = self._clock() + ANSWER_S
        self._intake.poll(self._membership, self._clock(), at_once=True)
        while self._line.lacks(truth.step) and self._holders(truth) and self._clock() < deadline:
            self._intake.fill(self._holders(truth)[0])
            self._listen(self._clock() + PULSE_S)

    def _save(self, truth: Position) -> str:
        """Have the holders write their state unless it is durable. Returns why that failed."""
        deadline = self._clock() + SAVE_S
        for _ in range(2):
            holders = self._holders(truth)
            if self._saves.committed >= truth.step or truth.step == 0 or not holders:
                break
            self._last_save = None
            if not self._saves.pending(truth.step):
                for part, id in enumerate(holders):
                    self._cluster.write_checkpoint(id, self._membership.generation, part, len(holders))
            while not self._save_ended(truth.step):
                if self._clock() > deadline or self._holders(truth) != holders:
                    break
                self._listen(self._clock() + PULSE_S)
        if self._saves.committed >= truth.step or truth.step == 0:
            return ""
        ended = self._save_ended(truth.step)
        return ended.error if ended else f"nobody wrote it within {SAVE_S:g} s"

    def _save_ended(self, step: int) -> SaveEnded | None:
        ended = self._last_save
        return ended if ended is not None and ended.step >= step else None

    def _holders(self, truth: Position) -> list[str]:
        return [m.id for m in self._membership.current if m.position == truth]
