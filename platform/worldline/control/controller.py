"""The elastic controller: sense, decide, order, until the line is finished or cannot go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worldline.checkpoint.manifest import CheckpointError
from worldline.control import places, planner
from worldline.control.budget import Budget
from worldline.control.cluster import Cluster
from worldline.control.decisions import (
    Abandon,
    Condemn,
    Decision,
    Expel,
    Form,
    Halt,
    Inquire,
    Limits,
    Meet,
    Over,
    Proceed,
    Release,
    Save,
    Wait,
)
from worldline.control.ending import Conclusion, Ending
from worldline.control.hangs import Hangs
from worldline.control.injector import Injector
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.line import Line
from worldline.control.operators import Operators
from worldline.control.rescue import Rescue
from worldline.control.restore import RestorePoint
from worldline.control.saves import Saves
from worldline.control.sensors import PULSE_S, Sensors
from worldline.control.signals import Signals, StopRequested
from worldline.control.staffing import Staffing
from worldline.events import EventKind
from worldline.exits import FAILED, FINISHED, TRY_AGAIN
from worldline.storage import StorageError
from worldline.tracking.status import RunState
from worldline.worker.orders import EndKind, Hello

COMMIT_S = 60.0


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
    forget_before: Callable[[int], None]
    """Told of each generation that trains: nobody needs what older ones left behind where they met."""
    injector: Injector | None = None
    """Makes go wrong what a fault script says."""
    clock: Callable[[], float] = field(default=time.monotonic)


class Controller:
    """Owns one attempt of a run.

    Every change of the world, be it a death, a join or a stop, goes the same way. Signals come in (`Sensors`)
    and change the membership; the planner, a pure function, says the one next thing to do (`_act`): have a
    broken generation's members say where they are, have those who will be next connect while a healthy one
    trains, halt that at a step border, or form the next generation from whoever is ready. The highest
    completed step among the survivors is the truth; those behind and those new get it from those who hold it.
    Only if nobody does, or a checkpoint is ahead of them all, that is read. In the end `Ending` brings home
    what the members still hold.
    """

    def __init__(self, parts: Parts) -> None:
        self._cluster = parts.cluster
        self._line = parts.line
        self._saves = parts.saves
        self._intake = parts.intake
        self._journal = parts.journal
        self._limits = parts.limits
        self._restore = parts.restore
        self._forget_before = parts.forget_before
        self._clock = parts.clock
        self._sensors = Sensors(
            parts.signals,
            parts.cluster,
            parts.intake,
            parts.journal,
            parts.budget,
            parts.refuse,
            parts.clock,
        )
        self._ending = Ending(
            self._sensors, parts.cluster, parts.intake, parts.line, parts.saves, parts.clock
        )
        self._staffing = Staffing(self._sensors, parts.cluster, parts.intake, parts.journal)
        self._hangs = Hangs(self._sensors, parts.cluster, parts.intake, parts.line, parts.journal)
        self._rescue = Rescue(self._sensors, parts.cluster, parts.intake, parts.saves, parts.journal)
        self._operators = Operators(self._sensors, parts.journal)
        self._injector = parts.injector
        self._dead_end: Conclusion | None = None
        self._pause_since: float | None = None
        self._announced = 0

    def run(self) -> Conclusion:
        """Drive the run until it ends. All workers are gone when this returns or raises."""
        try:
            self._journal.state(RunState.STARTING)
            return self._ending.conclude(self._loop())
        finally:
            self._cluster.dismiss_all()

    def _loop(self) -> Conclusion:
        sensors = self._sensors
        while True:
            now = sensors.heard_until
            conclusion = self._verdict()
            if conclusion is not None:
                return conclusion
            self._limits = self._operators.hear(self._limits)
            self._inject(now)
            decision = planner.decide(
                sensors.membership,
                self._limits,
                stopping=sensors.stop is not None,
                durable=self._saves.committed,
                below_min_since=self._staffing.below_min_since(self._limits, now),
                patience_s=self._hangs.patience_s(self._limits),
                now=now,
            )
            if isinstance(decision, Over):
                return self._over()
            until = self._act(decision, now)
            sensors.listen(now if until is None else until)
            self._announce()

    def _inject(self, now: float) -> None:
        if self._injector is not None:
            ranks = {m.rank: m.id for m in self._sensors.membership.current}
            self._injector.strike(self._line.last_step, now, ranks, self._limits.max)

    def _verdict(self) -> Conclusion | None:
        """Whether it is over, and how, where that does not depend on the plan."""
        sensors = self._sensors
        if sensors.lease_lost:
            return Conclusion(RunState.STOPPED, sensors.lease_lost, TRY_AGAIN)
        if self._intake.drift:
            return Conclusion(RunState.FAILED, self._intake.drift, FAILED)
        if self._dead_end is not None:
            return self._dead_end
        if sensors.budget.verdict and not sensors.membership.training:
            return Conclusion(RunState.FAILED, sensors.budget.verdict, FAILED)
        return None

    def _over(self) -> Conclusion:
        if any(m.end and m.end.kind is EndKind.FINISHED for m in self._sensors.membership.current):
            return Conclusion(RunState.FINISHED, "", FINISHED)
        stop = self._sensors.stop
        assert stop is not None, "nothing but the end of the line or a stop ends a healthy run"
        return Conclusion(RunState.STOPPED, stop.reason, stop.exit_code)

    def _act(self, decision: Decision, now: float) -> float | None:
        """Carry a decision out. Returns until when to listen, None to decide again at once."""
        sensors, generation = self._sensors, self._sensors.membership.generation
        match decision:
            case Proceed(until):
                self._staffing.top_up(self._limits, now)
                return now + PULSE_S if until is None else until
            case Wait():
                if not self._staffing.top_up(self._limits, now):
                    return self._wait(decision, now)
            case Abandon(ids, reason):
                self._pause(now, RunState.RECOVERING, reason)
                for id in ids:
                    self._cluster.abandon(id, generation)
                sensors.membership = sensors.membership.asked_to_abandon(ids, reason, now)
            case Expel(ids, reason):
                for id in ids:
                    sensors.lose(id, reason)
            case Inquire():
                self._hangs.inquire(decision)
            case Condemn():
                self._hangs.condemn(decision, now)
                self._pause(now, RunState.RECOVERING, decision.diagnosis)
            case Release(ids):
                self._release(ids)
            case Save():
                self._staffing.top_up(self._limits, now)
                return self._rescue.save(decision, now)
            case Meet(gathering):
                step = self._line.last_step + 1
                invitations = places.invitations(gathering, sensors.membership, self._limits, step)
                for id, invitation in invitations.items():
                    self._cluster.meet(id, invitation)
                sensors.membership = sensors.membership.asked_to_meet(gathering)
            case Halt(ids):
                self._pause(now, RunState.DRAINING if sensors.stop else RunState.RUNNING, "")
                for id in ids:
                    self._cluster.halt(id, generation)
                sensors.membership = sensors.membership.asked_to_halt(now)
            case Form():
                self._form(decision, now)
            case Over():
                raise AssertionError("the loop ends before")
        return None

    def _release(self, ids: tuple[str, ...]) -> None:
        """They leave in order."""
        members = self._sensors.membership.members
        for id in ids:
            drain = members[id].drain
            reason = drain.reason if drain is not None else "more workers than are wanted"
            self._journal.event(EventKind.WORKER_RELEASED, reason, workers=[id])
        self._sensors.let_go(ids)

    def _wait(self, wait: Wait, now: float) -> float | None:
        reason = wait.reason
        if now >= wait.until:
            last = f"; last: {self._sensors.last_failure}" if self._sensors.last_failure else ""
            self._sensors.stop = StopRequested(
                f"{reason}; gave up after {self._limits.start_s:g} s{last}", TRY_AGAIN
            )
            return None
        if self._sensors.membership.generation == 0:
            self._journal.state(RunState.STARTING, reason)
        else:
            if self._journal.status.state is not RunState.WAITING:
                self._journal.event(EventKind.WAITING, reason)
            self._journal.state(RunState.WAITING, reason)
        return wait.until if wait.look is None else wait.look

    def _pause(self, now: float, state: RunState, reason: str) -> None:
        if self._pause_since is None:
            self._pause_since = now
        self._journal.state(state, reason)

    def _form(self, form: Form, now: float) -> None:
        """Issue the next generation."""
        sensors, membership = self._sensors, self._sensors.membership
        ends = {m.end.kind for m in membership.current if m.end is not None}
        if membership.trouble and not membership.lost and EndKind.TASK_ERROR not in ends:
            self._journal.event(EventKind.COLLECTIVE_FAILED, membership.trouble)
        # Nor may a checkpoint wait for the part of one who leaves, and may be gone before it has told.
        torn = bool(membership.trouble) or any(m.id not in form.ids for m in membership.current)
        if torn:
            self._saves.forget(membership.generation)
        point = self._find_point() if form.position is None else RestorePoint(form.position)
        if point is None:
            return
        if self._intake.go_on(point.position, membership.generation) or form.position is None:
            self._journal.rewound(point.position.step)
        if form.position is None and point.key is None and self._lose_used(form.ids):
            return
        if membership.generation:
            sensors.budget = sensors.budget.after_generation(point.position.step, membership.trouble)
        if sensors.budget.verdict:
            return
        if point.key is not None:
            self._journal.event(EventKind.RESTORED, point.key)
        orders = places.orders(
            form,
            membership.generation + 1,
            self._limits,
            position=point.position,
            restore=point.key,
            # It may have broken while its members wrote the one that was due.
            checkpoint=torn and self._saves.overdue(point.position.step),
            met=membership.met_as(form.ids),
            stalled=point.position == membership.position,
        )
        self._pause_since = now if self._pause_since is None else self._pause_since
        now = self._clock()  # finding the point may have taken long
        shards = {id: order.ranges[order.rank] for id, order in orders.items()}
        sensors.membership = membership.formed(form.ids, point.position, now, shards)
        self._journal.generation(sensors.membership.generation)
        for id, order in orders.items():
            self._cluster.train(id, order)
        self._staffing.settle(now)

    def _find_point(self) -> RestorePoint | None:
        """Nobody holds the state: the newest checkpoint, or the start. None if that cannot be found out."""
        self._saves.settle(COMMIT_S)
        try:
            point = self._restore()
        except CheckpointError as error:
            self._dead_end = Conclusion(RunState.FAILED, str(error), FAILED)
            return None
        except StorageError as error:
            self._dead_end = Conclusion(RunState.STOPPED, str(error), TRY_AGAIN)
            return None
        self._saves.rewind(point.position.step, durable=point.key is not None)
        return point

    def _lose_used(self, ids: tuple[str, ...]) -> bool:
        """The line begins anew, and only those who never trained are as they were built."""
        members = self._sensors.membership.members
        used = [id for id in ids if members[id].generations]
        for id in used:
            self._sensors.lose(id, "holds no whole state, and there is no checkpoint to give it one")
        return bool(used)

    def _announce(self) -> None:
        """Say it once when a new generation trains."""
        membership = self._sensors.membership
        if self._intake.formed < membership.generation or self._announced == membership.generation:
            return
        self._announced = membership.generation
        self._forget_before(membership.generation)
        seconds = None if self._pause_since is None else self._clock() - self._pause_since
        self._pause_since = None
        current = membership.current
        self._journal.event(
            EventKind.GENERATION_FORMED,
            workers=[m.id for m in current],
            world=len(current),
            seconds=seconds,
        )
        self._journal.state(RunState.DRAINING if self._sensors.stop else RunState.RUNNING)
