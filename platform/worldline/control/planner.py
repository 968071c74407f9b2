"""What to do next: a pure function of the membership, the limits and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worldline.control.membership import Gathering, Member, Membership, MemberState
from worldline.worker.orders import EndKind, GenerationOrder, Invitation, Meeting
from worldline.world import Position, ShardRange, assign_near

NOWHERE = Position(-1)


@dataclass(frozen=True)
class Limits:
    """min, max, standby: of the world. Times are seconds.

    start_s: how long the world may stay below min. timeout_s: the longest a worker computes without looking
    up. answer_s: how long a process may be silent once it was told to abandon its generation. gather_s: how
    long ready workers wait for others, so that they start or join together. meet_s: how long a healthy
    generation is let alone for the next one to connect beside it.
    """

    min: int
    max: int
    standby: int
    num_shards: int
    start_s: float
    timeout_s: float
    answer_s: float = 5.0
    gather_s: float = 3.0
    meet_s: float = 10.0

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
    """The world is below min; give up after `until`."""

    reason: str
    until: float


@dataclass(frozen=True)
class Over:
    """Nobody trains, and nobody shall: the line is finished or was stopped."""


Decision = Proceed | Abandon | Expel | Meet | Halt | Form | Wait | Over


def missing(membership: Membership, limits: Limits) -> int:
    """How many workers to request so that as many as wanted are there or on their way."""
    return max(0, limits.target - len(membership.members))


def decide(
    membership: Membership,
    limits: Limits,
    *,
    stopping: bool,
    durable: int,
    below_min_since: float,
    now: float,
) -> Decision:
    """The one next thing to do.

    durable: step of the newest checkpoint, -1 if there is none. below_min_since: since when there have been
    fewer than min ready workers.
    """
    training = membership.training
    if training and membership.trouble:
        return _collect(membership, training, limits, now)
    if training:
        return _tend(membership, training, limits, stopping, now)
    if stopping or any(m.end is not None and m.end.kind is EndKind.FINISHED for m in membership.current):
        return Over()
    return _form(membership, limits, durable, below_min_since, now)


def _collect(membership: Membership, training: list[Member], limits: Limits, now: float) -> Decision:
    """Have every member say where it is; who does not is out.

    A process that is silent is given up soon. One that answers is only busy, and has until it must look up.
    """
    unasked = tuple(m.id for m in training if m.asked is None)
    if unasked:
        return Abandon(unasked, membership.trouble)
    asked = {m.id: m.asked for m in training if m.asked is not None}
    heard = {m.id: m.heard for m in training if m.heard is not None}
    silent_at = {id: heard.get(id, since) + limits.answer_s for id, since in asked.items()}
    busy_until = {id: since + max(limits.timeout_s, limits.answer_s) for id, since in asked.items()}
    for deadlines, reason in (
        (silent_at, f"did not answer for {limits.answer_s:g} s"),
        (busy_until, f"did not say within {limits.timeout_s:g} s where it is"),
    ):
        overdue = tuple(id for id, deadline in deadlines.items() if now >= deadline)
        if overdue:
            return Expel(overdue, reason)
    return Proceed(min(*silent_at.values(), *busy_until.values()))


def _tend(
    membership: Membership, training: list[Member], limits: Limits, stopping: bool, now: float
) -> Decision:
    """A healthy generation: halt it to stop, or to let standbys in once they are connected with it."""
    ids = tuple(m.id for m in training)
    if membership.halting is not None:
        # The way to the next border is at most a step and an evaluation.
        until = membership.halting + 2 * limits.timeout_s
        if now < until:
            return Proceed(until)
        return Abandon(ids, f"no step border came within {2 * limits.timeout_s:g} s")
    if stopping:
        return Halt(ids)
    standbys = membership.in_state(MemberState.STANDBY)
    if not standbys or len(membership.current) >= limits.max:
        return Proceed()
    more_until = _wait_for_others(membership, limits, now)
    if more_until is not None:
        return Proceed(more_until)
    wanted = tuple(m.id for m in [*membership.current, *standbys])[: limits.max]
    gathering = membership.gathering
    if gathering is None or gathering.ids != wanted:
        return Meet(Gathering(1 if gathering is None else gathering.number + 1, wanted, now))
    until = gathering.since + limits.meet_s
    if gathering.complete or gathering.failed:
        return Halt(ids)
    if now < until:
        return Proceed(until)
    heard = {m.id: m.since if m.heard is None else m.heard for m in standbys if m.id in wanted}
    silent = tuple(id for id, at in heard.items() if now - at >= limits.answer_s)
    if silent:
        return Expel(silent, f"did not answer for {limits.answer_s:g} s while it was to connect")
    # They may connect later, too: it only takes longer while all stand still.
    return Halt(ids)


def _form(
    membership: Membership, limits: Limits, durable: int, below_min_since: float, now: float
) -> Decision:
    ready = membership.current + membership.in_state(MemberState.STANDBY)
    if len(ready) < limits.min:
        pending = len(membership.in_state(MemberState.REQUESTED))
        return Wait(
            f"{len(ready)} of at least {limits.min} workers are ready, {pending} requested",
            below_min_since + limits.start_s,
        )
    if not membership.current:
        until = _wait_for_others(membership, limits, now)
        if until is not None:
            return Proceed(until)

    def held(member: Member) -> Position:
        """A newcomer that did not get the state yet is at step 0, whole: a checkpoint is ahead of that."""
        position = member.position
        return NOWHERE if position is None or position.step < durable else position

    # Who holds the most comes first, so that rank 0 holds the truth; then the old ranks.
    chosen = sorted(ready, key=held, reverse=True)[: limits.max]
    truth = held(chosen[0])
    ids, before = tuple(m.id for m in chosen), tuple(m.shards for m in chosen)
    if truth == NOWHERE:
        return Form(ids, (), None, before)
    sources = tuple(rank for rank, m in enumerate(chosen) if held(m) == truth)
    return Form(ids, sources, truth, before)


def _wait_for_others(membership: Membership, limits: Limits, now: float) -> float | None:
    """None if those who are ready should wait no longer for others, else until when."""
    standbys = membership.in_state(MemberState.STANDBY)
    room = limits.max - len(membership.current)
    if len(standbys) >= room or not membership.in_state(MemberState.REQUESTED):
        return None
    until = min(m.since for m in standbys) + limits.gather_s
    return None if now >= until else until


def invitations(
    gathering: Gathering, membership: Membership, limits: Limits, step: int
) -> Mapping[str, Invitation]:
    """What each of `gathering` is told. step: where the line will be."""
    ids, generation = gathering.ids, membership.generation + 1
    shards = assign_near(limits.num_shards, tuple(membership.members[id].shards for id in ids))
    return {
        id: Invitation(Meeting(generation, gathering.number, rank, len(ids)), shards[rank], step)
        for rank, id in enumerate(ids)
    }


def orders(
    form: Form,
    generation: int,
    limits: Limits,
    *,
    position: Position,
    restore: str | None,
    checkpoint: bool,
    met: int = 0,
    stalled: bool = False,
) -> Mapping[str, GenerationOrder]:
    """The order for each worker of `form`.

    position, restore: where the line goes on, and the checkpoint to read if nobody holds the state (None:
    from the start, which every worker holds as built). met: the meeting at which they connected, 0 if at
    none. stalled: no step was completed since the state was last agreed on, if it was: who holds it claims it
    anew.
    """
    ranks = range(len(form.ids))
    shards = assign_near(limits.num_shards, form.before)
    nobody = form.position is None
    if not nobody:
        sources = form.sources
    elif restore is not None:
        sources = (0,)
    else:
        sources = tuple(ranks)
    receivers = tuple(rank for rank in ranks if rank not in sources)
    return {
        id: GenerationOrder(
            generation=generation,
            rank=rank,
            ranges=shards,
            position=position,
            sources=sources,
            receivers=receivers,
            restore=restore if nobody else None,
            verify_state=nobody or stalled,
            checkpoint=checkpoint,
            met=met,
        )
        for rank, id in enumerate(form.ids)
    }
