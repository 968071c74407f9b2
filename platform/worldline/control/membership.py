"""Which workers there are, and what befell their generation. Pure; time is an argument.

A worker's own states are in `control.member`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from worldline.control.member import Drain, Member, MemberState, Suspicion
from worldline.health.condition import Condition
from worldline.worker.orders import EndKind, GenerationEnd, Hello, Met
from worldline.world import Position, ShardRange

START = Position(0)


@dataclass(frozen=True)
class Gathering:
    """Workers, by rank to be, who connect for the next generation while the current one trains.

    since: when they were asked to. there: who is connected. failed: why they cannot be, if one says so.
    """

    number: int
    ids: tuple[str, ...]
    since: float
    there: frozenset[str] = frozenset()
    failed: str = ""

    @property
    def complete(self) -> bool:
        return self.there == set(self.ids)


@dataclass(frozen=True)
class Inquiry:
    """Every member of a generation that does not go on is asked what it does. answers: by worker."""

    since: float
    ids: tuple[str, ...]
    answers: Mapping[str, Condition | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.answers.keys() >= set(self.ids)


@dataclass(frozen=True)
class Membership:
    """All workers that are not out, and what befell the current generation.

    generation: 0 before the first. position: where it began. trouble: why it cannot go on, empty while it
    can. lost: how many of its members are out. halting: since when its members are told to stop at a border.
    gathering: for the generation after this one. changes: when the generations of the last minute were
    formed. furthest, moved: the position that some member was heard of at, and when that was first. inquiry:
    what is found out if it does not move.
    """

    members: Mapping[str, Member] = field(default_factory=dict)
    generation: int = 0
    position: Position = START
    trouble: str = ""
    lost: int = 0
    halting: float | None = None
    gathering: Gathering | None = None
    changes: tuple[float, ...] = ()
    furthest: Position = START
    moved: float = 0.0
    inquiry: Inquiry | None = None

    def in_state(self, state: MemberState) -> Sequence[Member]:
        """Members by rank, others in the order of their coming into this state."""
        return self._by_state[state]

    @property
    def current(self) -> Sequence[Member]:
        return self._by_state[MemberState.MEMBER]

    @cached_property
    def training(self) -> Sequence[Member]:
        return tuple(m for m in self.current if m.training)

    @cached_property
    def _by_state(self) -> Mapping[MemberState, Sequence[Member]]:
        """Sorted once for each value: a world may have thousands of workers."""
        found: dict[MemberState, list[Member]] = {state: [] for state in MemberState}
        for member in self.members.values():
            found[member.state].append(member)
        return {state: tuple(sorted(ms, key=_place)) for state, ms in found.items()}

    def requested(self, id: str, now: float) -> Membership:
        if id in self.members:
            raise ValueError(f"worker {id} was requested before")
        return self._with(Member(id, MemberState.REQUESTED, now))

    def arrived(self, id: str, pid: int, node: str, ip: str, now: float) -> Membership:
        """Ray gave it a place, and its process runs."""
        member = self.members.get(id)
        if member is None or member.state is not MemberState.REQUESTED:
            return self
        state = MemberState.STARTING
        return self._with(replace(member, state=state, since=now, pid=pid, node=node, ip=ip))

    def ready(self, id: str, hello: Hello, now: float) -> Membership:
        member = self.members.get(id)
        if member is None or member.state not in (MemberState.REQUESTED, MemberState.STARTING):
            return self
        state = MemberState.STANDBY
        return self._with(
            replace(member, state=state, since=now, pid=hello.pid, node=hello.node, ip=hello.ip, hello=hello)
        )

    def draining(self, ids: Sequence[str], drain: Drain) -> Membership:
        """These shall leave; an earlier deadline that they have stays."""
        changed = {
            id: replace(self.members[id], drain=drain)
            for id in ids
            if (old := self.members[id].drain) is None or drain.deadline < old.deadline
        }
        return replace(self, members={**self.members, **changed})

    def suspected(self, id: str, suspicion: Suspicion) -> Membership:
        member = self.members.get(id)
        if member is None:
            return self
        whole = suspicion if member.suspicion is None else member.suspicion.and_also(suspicion)
        return self._with(replace(member, suspicion=whole))

    def cleared(self, id: str) -> Membership:
        """It was heard again: what the others were asked because of its silence is to be asked of it, too."""
        member = self.members.get(id)
        if member is None or member.suspicion is None:
            return self
        left = replace(member.suspicion, silent=False) if member.suspicion.final else None
        return replace(self._with(replace(member, suspicion=left)), inquiry=None)

    def released(self, ids: Sequence[str]) -> Membership:
        """They leave in order; none of them trains."""
        return replace(self, members={id: m for id, m in self.members.items() if id not in set(ids)})

    def out(self, id: str, reason: str) -> Membership:
        """It died, failed to start or did not answer. Training without it is over, if it was a member."""
        member = self.members.get(id)
        if member is None:
            return self
        rest = {key: m for key, m in self.members.items() if key != id}
        hurt = member.training and not self.trouble
        return replace(
            self,
            members=rest,
            trouble=f"rank {member.rank} {reason}" if hurt else self.trouble,
            lost=self.lost + (member.state is MemberState.MEMBER),
        )

    def ended(self, ends: Mapping[str, GenerationEnd]) -> Membership:
        """How the generation ended for these; all at once, as it ends for thousands at the same time."""
        members, trouble = dict(self.members), self.trouble
        for id, end in ends.items():
            member = members.get(id)
            if member is None or end.generation != self.generation or not member.training:
                continue
            members[id] = replace(member, end=end)
            if end.kind not in (EndKind.FINISHED, EndKind.HALTED) and not trouble:
                trouble = f"rank {member.rank}: {end.reason}"
        return replace(self, members=members, trouble=trouble)

    def asked_to_abandon(self, ids: Sequence[str], reason: str, now: float) -> Membership:
        asked = {id: replace(self.members[id], asked=now) for id in ids}
        return replace(self, members={**self.members, **asked}, trouble=self.trouble or reason)

    def came_to(self, position: Position, now: float) -> Membership:
        """A member was heard of there."""
        if position <= self.furthest:
            return self
        return replace(self, furthest=position, moved=now, inquiry=None)

    def inquired(self, ids: Sequence[str], now: float) -> Membership:
        return replace(self, inquiry=Inquiry(now, tuple(ids)))

    def described(self, id: str, condition: Condition | None) -> Membership:
        """A member says what it does; None if it cannot."""
        if self.inquiry is None or id not in self.inquiry.ids:
            return self
        answers = {**self.inquiry.answers, id: condition}
        return replace(self, inquiry=replace(self.inquiry, answers=answers))

    def asked_to_meet(self, gathering: Gathering) -> Membership:
        return replace(self, gathering=gathering)

    def met(self, id: str, said: Met) -> Membership:
        gathering = self.gathering
        if gathering is None or (said.generation, said.number) != (self.generation + 1, gathering.number):
            return self
        there = gathering.there if said.error else gathering.there | {id}
        failed = gathering.failed or said.error
        return replace(self, gathering=replace(gathering, there=there, failed=failed))

    def met_as(self, ids: Sequence[str]) -> int:
        """Number of the meeting at which just these, as ranks 0, 1, ..., have connected; 0 if at none."""
        gathering = self.gathering
        if gathering is None or not gathering.complete or gathering.ids != tuple(ids):
            return 0
        return gathering.number

    def asked_to_halt(self, now: float) -> Membership:
        return replace(self, halting=now)

    def formed(
        self,
        ids: Sequence[str],
        position: Position,
        now: float,
        shards: Mapping[str, ShardRange] = MappingProxyType({}),
    ) -> Membership:
        """The next generation, with `ids` as ranks 0, 1, ...; a member left out becomes a standby again."""
        for member in self.current:
            if member.training:
                raise ValueError(f"worker {member.id} still trains in generation {self.generation}")
        ranks = {id: rank for rank, id in enumerate(ids)}
        members = {}
        for id, member in self.members.items():
            if id in ranks:
                if member.state not in (MemberState.STANDBY, MemberState.MEMBER):
                    raise ValueError(f"worker {id} is not ready")
                since = member.since if member.state is MemberState.MEMBER else now
                members[id] = member.anew(MemberState.MEMBER, since, ranks[id], shards.get(id))
            elif member.state is MemberState.MEMBER:
                members[id] = member.anew(MemberState.STANDBY, now)
            else:
                members[id] = member
        changes = (*(at for at in self.changes if at > now - 60), now)
        return Membership(
            members, self.generation + 1, position, changes=changes, furthest=position, moved=now
        )

    def renumbered(self) -> Membership:
        """Nobody trains, and the next generation's number is used for something else."""
        return replace(self, generation=self.generation + 1, gathering=None)

    def _with(self, member: Member) -> Membership:
        return replace(self, members={**self.members, member.id: member})


def _place(member: Member) -> tuple[int, float]:
    return member.rank, member.since
