"""One worker, as the controller sees it. Pure; time is an argument.

    requested -> starting -> standby <-> member
        |            |          |          |
        +------------+----------+----------+---> out

A worker is requested until Ray has given it a place, and starting until its process has built and checked
everything; then it is a standby and may be admitted at a step border. A member has a rank in the current
generation until that ends for it; it stays a member, with its state, until the next generation is formed.
Out is final: whoever comes back comes as a new worker.

Two more things may be true of a worker in any state: it is *draining* (it shall leave by a deadline, and no
generation is formed with it that is not needed), or *suspect* (it gives no sign of life, or Ray cannot reach
it). A node whose workers failed is *cooling*: `control.cooling`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from worldline.worker.orders import GenerationEnd, Hello
from worldline.world import Position, ShardRange


class MemberState(StrEnum):
    REQUESTED = "requested"
    STARTING = "starting"
    STANDBY = "standby"
    MEMBER = "member"


@dataclass(frozen=True)
class Drain:
    """A planned leave. since: when it was announced; deadline: when the worker may be taken away."""

    since: float
    deadline: float
    reason: str


@dataclass(frozen=True)
class Suspicion:
    """What speaks against a worker; it is given up at `deadline` unless it is heard again. silent: whether it
    gives no sign of life, so that the others cannot go on. final: whether a call to it failed, the answer to
    which nobody will ever hear, however well it is.
    """

    deadline: float
    reason: str
    silent: bool = False
    final: bool = False

    def and_also(self, other: Suspicion) -> Suspicion:
        return Suspicion(
            min(self.deadline, other.deadline),
            self.reason,
            self.silent or other.silent,
            self.final or other.final,
        )


@dataclass(frozen=True)
class Member:
    """One worker. since: when it came into its state. node: where it runs, empty before that is known.
    generations: how many it has been a member of; after the first its state is not as it was built.

    The rest is of the current generation. shards: what it computes. end: how the generation ended for it,
    None while it trains. asked: when it was told to abandon it.
    """

    id: str
    state: MemberState
    since: float
    node: str = ""
    pid: int = 0
    ip: str = ""
    hello: Hello | None = None
    generations: int = 0
    drain: Drain | None = None
    suspicion: Suspicion | None = None
    rank: int = -1
    shards: ShardRange | None = None
    end: GenerationEnd | None = None
    asked: float | None = None

    @property
    def training(self) -> bool:
        return self.state is MemberState.MEMBER and self.end is None

    def anew(
        self, state: MemberState, since: float, rank: int = -1, shards: ShardRange | None = None
    ) -> Member:
        """As it comes into the next generation: nothing of the last one counts."""
        return replace(
            self,
            state=state,
            since=since,
            generations=self.generations + (state is MemberState.MEMBER),
            rank=rank,
            shards=shards,
            end=None,
            asked=None,
        )

    @property
    def stays(self) -> bool:
        """Whether the next generation may be planned with it."""
        return self.drain is None and self.suspicion is None

    @property
    def position(self) -> Position | None:
        """Where its state is on the line, as far as known; a standby has none that counts."""
        return self.end.position if self.end is not None else None
