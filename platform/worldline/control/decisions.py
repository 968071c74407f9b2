"""What the planner may decide, and the limits it decides within."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worldline.control.membership import Gathering
from worldline.world import Position, ShardRange


@dataclass(frozen=True)
class Limits:
    """min, max, standby: of the world. Times are seconds.

    start_s: how long the world may stay below min, and a process may take to become ready. timeout_s: the
    longest a worker computes without looking up. gather_s: how long ready workers wait for others, so that
    they start or join together. meet_s: how long a healthy generation is let alone for the next one to
    connect beside it. leave_s: what a draining worker needs to leave in order, the writing of a checkpoint
    included. hang_s: how long a generation may stand still at least. inquire_s: how long a member has to say
    what it does. changes_a_minute: beyond so many generations, newcomers wait. generations_a_worker: after so
    many a worker is replaced, as it keeps the connections of each.
    """

    min: int
    max: int
    standby: int
    num_shards: int
    start_s: float
    timeout_s: float
    gather_s: float = 3.0
    meet_s: float = 15.0
    leave_s: float = 5.0
    hang_s: float = 10.0
    inquire_s: float = 1.0
    changes_a_minute: int = 30
    generations_a_worker: int = 64

    @property
    def target(self) -> int:
        """Workers to keep asked for; those beyond max stay as spares."""
        return self.max + self.standby


@dataclass(frozen=True)
class Proceed:
    """Nothing to do before the next event, or before `until`."""

    until: float | None = None


@dataclass(frozen=True)
class Abandon:
    """The generation is broken: these members must say where they are."""

    ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Expel:
    """These members did not answer: they are out, and killed where they can be reached."""

    ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Inquire:
    """The generation does not go on: its members must say what they do."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Condemn:
    """It is known why the generation does not go on.

    reasons: of those who are to blame, by worker; they are out. If there are none, all members must form the
    next generation anew. alive: whether those to blame answered, so that it is their code that hangs.
    diagnosis: for people, a paragraph; accounts: what each member does, in lines.
    """

    reasons: Mapping[str, str]
    alive: bool
    diagnosis: str
    accounts: str


@dataclass(frozen=True)
class Release:
    """Nobody needs these any more: they were drained, or are more than are wanted."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Save:
    """Nobody trains, and the last who hold this state must leave: they write it before `until`."""

    ids: tuple[str, ...]
    position: Position
    until: float


@dataclass(frozen=True)
class Meet:
    """These will be the next generation, as ranks 0, 1, ...: they may connect while this one trains."""

    gathering: Gathering


@dataclass(frozen=True)
class Halt:
    """Stop at the next step border, all at the same one."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """Form the next generation with these workers as ranks 0, 1, ...

    position: the truth that `sources` (ranks) hold; None if nobody holds any state. before: the shards that
    each had.
    """

    ids: tuple[str, ...]
    sources: tuple[int, ...]
    position: Position | None
    before: tuple[ShardRange | None, ...]


@dataclass(frozen=True)
class Wait:
    """The world is below min; give up after `until`. look: when to decide again at the latest."""

    reason: str
    until: float
    look: float | None = None


@dataclass(frozen=True)
class Over:
    """Nobody trains, and nobody shall: the line is finished or was stopped."""


Decision = Proceed | Abandon | Expel | Inquire | Condemn | Release | Save | Meet | Halt | Form | Wait | Over
