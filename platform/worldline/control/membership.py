"""Who is in what state: requested, standby, member, out. Pure; time is an argument.

    requested -> standby -> member -> out
        |           |                  ^
        +-----------+------------------+

A worker is requested until its process has built and checked everything; then it is a standby and may be
admitted at a step border. A member has a rank in the current generation until that ends for it; it stays a
member, with its state, until the next generation is formed. Out is final: whoever comes back comes as a new
worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from worldline.worker.orders import EndKind, GenerationEnd, Hello, Met
from worldline.world import Position, ShardRange

START = Position(0)


class MemberState(StrEnum):
    REQUESTED = "requested"
    STANDBY = "standby"
    MEMBER = "member"


@dataclass(frozen=True)
class Member:
    """One worker. since: when it came into its state. The rest is of the current generation.

    shards: what it computes. end: how the generation ended for it, None while it trains. asked: when it was
    told to abandon it. heard: when its process last answered anything after that, or since it was to connect
    with others.
    """

    id: str
    state: MemberState
    since: float
    hello: Hello | None = None
    rank: int = -1
    shards: ShardRange | None = None
    end: GenerationEnd | None = None
    asked: float | None = None
    heard: float | None = None

    @property
    def training(self) -> bool:
        return self.state is MemberState.MEMBER and self.end is None

    @property
    def position(self) -> Position | None:
        """Where its state is on the line, as far as known; a standby has none that counts."""
        return self.end.position if self.end is not None else None


@dataclass(frozen=True)
class Gathering:
    """Workers, by rank to be, who connect for the next generation while the current one trains.

    since: when they were asked to. there: who is connected.
    """

    number: int
    ids: tuple[str, ...]
    since: float
    there: frozenset[str] = frozenset()
    failed: bool = False

    @property
    def complete(self) -> bool:
        return self.there == set(self.ids)


@dataclass(frozen=True)
class Membership:
    """All workers that are not out, and what befell the current generation.

    generation: 0 before the first. position: where it began. trouble: why it cannot go on, empty while it
    can. lost: how many of its members are out. halting: since when its members are told to stop at a border.
    gathering: for the generation after this one.
    """

    members: Mapping[str, Member] = field(default_factory=dict)
    generation: int = 0
    position: Position = START
    trouble: str = ""
    lost: int = 0
    halting: float | None = None
    gathering: Gathering | None = None

    def in_state(self, state: MemberState) -> list[Member]:
        """Members by rank, others in the order of their coming into this state."""
        return sorted((m for m in self.members.values() if m.state is state), key=lambda m: (m.rank, m.since))

    @property
    def current(self) -> list[Member]:
        return self.in_state(MemberState.MEMBER)

    @property
    def training(self) -> list[Member]:
        return [m for m in self.current if m.training]

    def requested(self, id: str, now: float) -> Membership:
        if id in self.members:
            raise ValueError(f"worker {id} was requested before")
        return self._with(Member(id, MemberState.REQUESTED, now))

    def ready(self, id: str, hello: Hello, now: float) -> Membership:
        member = self.members.get(id)
        if member is None or member.state is not MemberState.REQUESTED:
            return self
        return self._with(replace(member, state=MemberState.STANDBY, since=now, hello=hello))

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

    def ended(self, id: str, end: GenerationEnd) -> Membership:
        member = self.members.get(id)
        if member is None or end.generation != self.generation or not member.training:
            return self
        orderly = end.kind in (EndKind.FINISHED, EndKind.HALTED)
        trouble = self.trouble if orderly or self.trouble else f"rank {member.rank}: {end.reason}"
        return replace(self._with(replace(member, end=end)), trouble=trouble)

    def asked_to_abandon(self, ids: Sequence[str], reason: str, now: float) -> Membership:
        asked = {id: replace(self.members[id], asked=now) for id in ids}
        return replace(self, members={**self.members, **asked}, trouble=self.trouble or reason)

    def heard(self, id: str, now: float) -> Membership:
        """Its process answered something. Of interest only while something is awaited of it."""
        member = self.members.get(id)
        if member is None:
            return self
        asked = member.training and member.asked is not None
        if not asked and (self.gathering is None or id not in self.gathering.ids):
            return self
        return self._with(replace(member, heard=now))

    def asked_to_meet(self, gathering: Gathering) -> Membership:
        return replace(self, gathering=gathering)

    def met(self, id: str, said: Met) -> Membership:
        gathering = self.gathering
        if gathering is None or (said.generation, said.number) != (self.generation + 1, gathering.number):
            return self
        there = gathering.there if said.error else gathering.there | {id}
        failed = gathering.failed or bool(said.error)
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
                if member.state is MemberState.REQUESTED:
                    raise ValueError(f"worker {id} is not ready")
                since = member.since if member.state is MemberState.MEMBER else now
                members[id] = Member(id, MemberState.MEMBER, since, member.hello, ranks[id], shards.get(id))
            elif member.state is MemberState.MEMBER:
                members[id] = Member(id, MemberState.STANDBY, now, member.hello)
            else:
                members[id] = member
        return Membership(members, self.generation + 1, position)

    def _with(self, member: Member) -> Membership:
        return replace(self, members={**self.members, member.id: member})
