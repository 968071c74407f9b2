"""What is known: signals come in, membership and budgets change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from worldline.control.budget import Budget, start_delay
from worldline.control.causes import CauseKind
from worldline.control.cluster import Cluster
from worldline.control.cooling import Cooling
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.member import Drain, Member, MemberState, Suspicion
from worldline.control.membership import Membership
from worldline.control.signals import (
    Arrived,
    Cut,
    Degraded,
    Described,
    DrainRequested,
    Ended,
    Fetched,
    Heard,
    LeaseLost,
    Lost,
    NodeDraining,
    Ready,
    Resize,
    SaveEnded,
    Signal,
    Signals,
    Silent,
    StartFailed,
    StepsFetched,
    StopRequested,
    Unavailable,
)
from worldline.events import EventKind
from worldline.worker.orders import EndKind, GenerationEnd, Hello, Met, Notice
from worldline.world import Position

PULSE_S = 0.1
REFRESH_S = 0.1
"""Between two lists of all workers for the status, per 500 of them."""
TELL_S = 1.5
"""How long a silent worker is kept, for the others to tell what they wait for."""
PROVEN_S = 20.0
"""A worker that is lost sooner after it was admitted speaks against its node."""
DOUBT_S = 2.0
"""How long Ray may be unable to reach a worker before that is given up."""


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
        self.cooling = Cooling()
        self.requests: list[Resize | DrainRequested] = []
        """What operators ask for and nobody has answered yet."""
        self.request_from = 0.0
        """No worker is to be requested before this time."""
        self._signals = signals
        self._cluster = cluster
        self._intake = intake
        self._journal = journal
        self._refuse = refuse
        self.clock = clock
        self.heard_until = clock()
        """Everything that came before this time is taken in: what did not come by then did not come."""
        self._start_failures = 0
        self._anybody_was_ready = False
        self._refresh_at = 0.0
        self._tracebacks: set[str] = set()
        self._drains: dict[str, Drain] = {}
        self._graves: dict[str, tuple[int, int]] = {}  # worker -> (rank, step in which it was lost)

    def listen(self, until: float) -> None:
        """Take in all signals that are there, after waiting for one until then or the next pulse."""
        now = self.clock()
        self._intake.poll(self.membership, now)
        signal = self._signals.next(min(until - now, PULSE_S))
        came = []
        while signal is not None:
            came.append(signal)
            signal = self._signals.next(0)
        self.heard_until = self.clock()
        for _, group in groupby(came, type):
            alike = list(group)
            ends = {s.id: s.end for s in alike if isinstance(s, Ended)}
            if ends and not self.lease_lost:
                self._generation_ended(ends)
            for signal in alike:
                if not self.lease_lost:
                    self._sense(signal, self.clock())
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_S * max(1, len(self.membership.members) // 500)
            self._journal.refresh(self.membership, self._intake.progress)

    def lose(self, id: str, reason: str, dead: bool = False) -> None:
        """The worker is out, whatever it was. dead: its process is gone already, and Ray may say why."""
        member = self.membership.members.get(id)
        if member is None:
            return
        if member.state in (MemberState.REQUESTED, MemberState.STARTING):
            self._start_failed(id, reason, dead)
            return
        self._graves[id] = (member.rank, self.membership.furthest.step + 1)
        self._drop(id, reason, dead)
        was_member = member.state is MemberState.MEMBER
        self._journal.event(
            EventKind.WORKER_LOST,
            f"rank {member.rank} {reason}" if was_member else f"standby {reason}",
            workers=[id],
            world=len(self.membership.current) if was_member else None,
        )

    def _sense(self, signal: Signal, now: float) -> None:
        match signal:
            case Arrived():
                self.membership = self.membership.arrived(signal.id, signal.pid, signal.node, signal.ip, now)
                self._drain_if_late(signal, now)
            case Cut():
                self.lose(signal.id, "is gone", dead=True)
            case Silent() | Unavailable():
                self._suspect(signal, now)
            case Heard():
                self.membership = self.membership.cleared(signal.id)
            case Ready():
                self._welcome(signal, now)
            case StartFailed():
                self._cannot_start(signal.id, signal.reason)
            case Lost():
                self.lose(signal.id, signal.reason)
                self._explain(signal)
            case NodeDraining():
                self.drain_node(signal.node, signal.lead_s, signal.reason)
            case Degraded():
                self._journal.event(EventKind.DEGRADED, signal.reason)
            case Fetched():
                if signal.reports is not None:
                    self._see_position(signal.id, signal.reports.position, now)
                    for item in signal.reports.items:
                        if isinstance(item, Met):
                            self.membership = self.membership.met(signal.id, item)
                        elif isinstance(item, Notice):
                            self.drain([signal.id], item.lead_s, f"its process got {item.reason}")
                self._intake.fetched(signal, self.membership.members.get(signal.id), now)
            case Described() if signal.generation == self.membership.generation:
                self.membership = self.membership.described(signal.id, signal.condition)
            case Described():
                pass
            case StepsFetched():
                self._intake.steps_fetched(signal, self.membership.members.get(signal.id))
            case SaveEnded():
                self._saved(signal)
            case StopRequested():
                self.stop = self.stop or signal
                self._journal.event(EventKind.STOP_REQUESTED, signal.reason)
            case Resize() | DrainRequested():
                self.requests.append(signal)
            case LeaseLost():
                self.lease_lost = signal.reason
                self._journal.mute()

    def let_go(self, ids: Sequence[str]) -> None:
        """They leave in order."""
        for id in ids:
            self._cluster.dismiss(id)
            self._intake.forget(id)
        self.membership = self.membership.released(ids)

    def drain_node(self, node: str, lead_s: float, reason: str) -> None:
        """All who are there, or come there meanwhile, shall leave within `lead_s` seconds."""
        now = self.clock()
        self._drains = {node: drain for node, drain in self._drains.items() if now < drain.deadline}
        self._drains[node] = Drain(now, now + lead_s, reason)
        self.drain([m.id for m in self.membership.members.values() if m.node == node], lead_s, reason)

    def drain(self, ids: Sequence[str], lead_s: float, reason: str) -> None:
        """These shall leave within `lead_s` seconds."""
        now = self.clock()
        members = self.membership.members
        ids = [id for id in ids if id in members]
        if not ids:
            return
        self.membership = self.membership.draining(ids, Drain(now, now + lead_s, reason))
        who = ", ".join(
            f"rank {members[id].rank}" if members[id].state is MemberState.MEMBER else f"standby {id}"
            for id in ids
        )
        self._journal.event(
            EventKind.DRAINING, f"{who} shall leave within {lead_s:.0f} s: {reason}", workers=ids
        )

    def _drain_if_late(self, arrived: Arrived, now: float) -> None:
        """Ray placed it on a node before it heard that this one shall go."""
        drain = self._drains.get(arrived.node)
        if drain is not None and now < drain.deadline:
            self.drain([arrived.id], drain.deadline - now, drain.reason)

    def _see_position(self, id: str, position: Position | None, now: float) -> None:
        member = self.membership.members.get(id)
        if member is not None and member.training and position is not None:
            self.membership = self.membership.came_to(position, now)

    def _suspect(self, signal: Silent | Unavailable, now: float) -> None:
        member = self.membership.members.get(signal.id)
        if member is None:
            return
        if isinstance(signal, Silent):
            if member.state is MemberState.STARTING:
                return  # who imports and builds may be deaf for long
            reason = f"gave no sign of life for {signal.seconds:.1f} s: frozen, or cut off"
            suspicion = Suspicion(now + TELL_S, reason, silent=True)
        else:
            reason = f"could not be reached for {DOUBT_S:g} s: {signal.reason}"
            suspicion = Suspicion(now + DOUBT_S, reason, final=True)
        self.membership = self.membership.suspected(signal.id, suspicion)

    def _welcome(self, signal: Ready, now: float) -> None:
        if signal.id not in self.membership.members:
            return  # it was let go meanwhile
        refusal = self._refuse(signal.hello)
        if refusal:
            self._cannot_start(signal.id, refusal)
            return
        self._anybody_was_ready = True
        self._start_failures, self.last_failure = 0, ""
        self.membership = self.membership.ready(signal.id, signal.hello, now)
        self._journal.event(EventKind.WORKER_READY, workers=[signal.id])

    def _cannot_start(self, id: str, reason: str) -> None:
        """Its preparation raised, or it was refused. The job is to blame, unless others become ready."""
        if id not in self.membership.members:
            return
        self._start_failed(id, reason)
        if not self._anybody_was_ready and not self.membership.in_state(MemberState.STARTING):
            self.budget = self.budget.after_start_error(reason)

    def _explain(self, lost: Lost) -> None:
        """Why somebody is gone who is out already, where that says more than that it is."""
        rank, step = self._graves.pop(lost.id, (-1, 0))
        if lost.cause is None or lost.cause.kind is not CauseKind.OUT_OF_MEMORY:
            return
        who = f"rank {rank}" if rank >= 0 else f"worker {lost.id}"
        text = f"{who} ran out of memory at step {step}: {lost.cause.text}"
        self._journal.event(EventKind.OUT_OF_MEMORY, text, workers=[lost.id])
        if rank >= 0 and self.membership.furthest.step < step:  # else others came through
            self.budget = self.budget.after_out_of_memory(rank, step, text)

    def _start_failed(self, id: str, reason: str, dead: bool = False) -> None:
        if id not in self.membership.members:
            return
        self._drop(id, reason, dead)
        self._journal.event(EventKind.WORKER_START_FAILED, reason, workers=[id])
        self._start_failures += 1
        self.last_failure = reason
        self.request_from = self.clock() + start_delay(self._start_failures)

    def _drop(self, id: str, reason: str, dead: bool) -> None:
        self._blame_node(self.membership.members[id], self.clock())
        if dead:
            self._cluster.bury(id)
        else:
            self._cluster.kill(id)
        self._intake.forget(id)
        self.membership = self.membership.out(id, reason)

    def _blame_node(self, member: Member, now: float) -> None:
        proven = member.state is MemberState.MEMBER and now - member.since >= PROVEN_S
        if member.node and (member.suspicion is not None or not proven):
            strikes = 2.0 if member.suspicion is not None else 1.0
            self.cooling = self.cooling.struck(member.node, now, strikes)

    def _generation_ended(self, ends: Mapping[str, GenerationEnd]) -> None:
        before = self.membership
        self.membership = before.ended(ends)
        for id, end in ends.items():
            member = before.members.get(id)
            if member is not None and end.generation == before.generation:
                self._account_for(id, member, end)

    def _account_for(self, id: str, member: Member, end: GenerationEnd) -> None:
        self.budget = self.budget.after_end(end, member.rank)
        if end.position is not None:
            self._intake.expect(end.position.step)
        if end.kind is EndKind.TASK_ERROR:
            text = f"rank {member.rank}: {end.reason}"
            if end.traceback not in self._tracebacks:
                self._tracebacks.add(end.traceback)
                text += f"\n{end.traceback}"
            step = end.position.step if end.position is not None else None
            self._journal.event(EventKind.TASK_ERROR, text, workers=[id], step=step)

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
