"""What to do next: a pure function of the membership, the limits and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from worldline.control.decisions import (
    Abandon,
    Decision,
    Expel,
    Form,
    Halt,
    Limits,
    Meet,
    Over,
    Proceed,
    Release,
    Save,
    Wait,
)
from worldline.control.judgement import inquire
from worldline.control.member import Member, MemberState
from worldline.control.membership import Gathering, Membership
from worldline.control.selection import change_at, choose, doubtful, last_call, superfluous, wait_for_others
from worldline.worker.orders import EndKind
from worldline.world import Position

NOWHERE = Position(-1)


def missing(membership: Membership, limits: Limits) -> int:
    """How many workers to request so that as many as wanted are there or on their way."""
    return max(0, limits.target - sum(m.drain is None for m in membership.members.values()))


def decide(
    membership: Membership,
    limits: Limits,
    *,
    stopping: bool,
    durable: int,
    below_min_since: float,
    patience_s: float,
    now: float,
) -> Decision:
    """The one next thing to do.

    durable: step of the newest checkpoint, -1 if there is none. below_min_since: since when there have been
    fewer than min ready workers. patience_s: how long a generation may stand still before its members are
    asked what they do.
    """
    training = membership.training
    overdue = _overdue(membership, limits, now)
    if overdue is not None:
        return overdue
    if training and membership.trouble:
        decision = _collect(membership, training, limits, now)
    elif training:
        amiss = inquire(membership, limits, patience_s, now)
        decision = amiss or _tend(membership, training, limits, stopping, now)
    elif stopping or any(m.end is not None and m.end.kind is EndKind.FINISHED for m in membership.current):
        return Over()
    else:
        decision = _form(membership, limits, durable, below_min_since, now)
    return _look_up(decision, membership, limits, patience_s)


def _overdue(membership: Membership, limits: Limits, now: float) -> Decision | None:
    """Who is given up or let go whatever else is to be done."""
    for member in membership.members.values():
        if member.suspicion is not None and now >= member.suspicion.deadline:
            return Expel((member.id,), member.suspicion.reason)
    starting = membership.in_state(MemberState.STARTING)
    late = tuple(m.id for m in starting if now >= m.since + limits.start_s)
    if late:
        return Expel(late, f"was not ready {limits.start_s:g} s after its process began")
    unneeded = superfluous(membership, limits)
    return Release(unneeded) if unneeded else None


def _look_up(decision: Decision, membership: Membership, limits: Limits, patience_s: float) -> Decision:
    """No wait is longer than until somebody's deadline."""
    if not isinstance(decision, Proceed | Wait):
        return decision
    deadlines = [m.suspicion.deadline for m in membership.members.values() if m.suspicion is not None]
    if membership.training and not membership.trouble and membership.inquiry is None:
        deadlines.append(membership.moved + patience_s)
    deadlines += [m.since + limits.start_s for m in membership.in_state(MemberState.STARTING)]
    if isinstance(decision, Wait):
        return replace(decision, look=min([decision.until, *deadlines]))
    if decision.until is not None:
        deadlines.append(decision.until)
    return Proceed(min(deadlines, default=None))


def _collect(membership: Membership, training: Sequence[Member], limits: Limits, now: float) -> Decision:
    """Have every member say where it is; who does not is out. Silent ones are given up as such, at their
    time; one that only computes must look up at some time.
    """
    for member in training:
        if member.suspicion is not None and member.suspicion.silent:
            return Expel((member.id,), member.suspicion.reason)
    unasked = tuple(m.id for m in training if m.asked is None)
    if unasked:
        return Abandon(unasked, membership.trouble)
    asked = {m.id: m.asked for m in training if m.asked is not None}
    overdue = tuple(id for id, since in asked.items() if now >= since + limits.timeout_s)
    if overdue:
        return Expel(overdue, f"did not say within {limits.timeout_s:g} s where it is")
    return Proceed(min(asked.values()) + limits.timeout_s)


def _tend(
    membership: Membership,
    training: Sequence[Member],
    limits: Limits,
    stopping: bool,
    now: float,
) -> Decision:
    """A healthy generation: halt it to stop, or to go on with others than now once those are connected."""
    ids = tuple(m.id for m in training)
    if membership.halting is not None:
        # The way to the next border is at most a step and an evaluation.
        until = membership.halting + 2 * limits.timeout_s
        if now < until:
            return Proceed(until)
        return Abandon(ids, f"no step border came within {2 * limits.timeout_s:g} s")
    if any(m.suspicion is not None for m in training):
        return Proceed()
    if stopping:
        return Halt(ids)
    current = membership.current
    standbys = membership.in_state(MemberState.STANDBY)
    chosen = choose([*current, *standbys], {m.id for m in current}, limits, now)
    wanted = tuple(m.id for m in chosen)
    if set(wanted) == {m.id for m in current}:
        return Proceed(min((last_call(m.drain, limits) for m in current if m.drain), default=None))
    at = change_at(membership, chosen, limits, now)
    if now < at:
        return Proceed(at)
    if len(wanted) < max(2, limits.min):
        return Halt(ids)  # nobody to connect with
    return _meet(membership, chosen, limits, now)


def _meet(membership: Membership, chosen: Sequence[Member], limits: Limits, now: float) -> Decision:
    """Have the next members connect, then halt the present ones."""
    wanted = tuple(m.id for m in chosen)
    ids = tuple(m.id for m in membership.training)
    gathering = membership.gathering
    if gathering is None or gathering.ids != wanted:
        return Meet(Gathering(1 if gathering is None else gathering.number + 1, wanted, now))
    last_calls = [last_call(m.drain, limits) for m in membership.current if m.drain is not None]
    until = min([gathering.since + limits.meet_s, *last_calls])
    if gathering.complete:
        return Halt(ids)
    newcomers = tuple(id for id in wanted if id not in ids)
    if gathering.failed and newcomers:
        # Those who train are connected with each other, and need not stop for this.
        return Expel(newcomers, f"could not connect with the others: {gathering.failed}")
    if gathering.failed:
        return Halt(ids)
    if now < until:
        return Proceed(until)
    # They may connect later, too: it only takes longer while all stand still.
    return Halt(ids)


def _form(
    membership: Membership, limits: Limits, durable: int, below_min_since: float, now: float
) -> Decision:
    current = membership.current
    if any(m.suspicion is not None for m in current):
        return Proceed()
    strangers = doubtful(membership, limits)
    if strangers:
        return Expel(strangers, f"came into a generation that completed no step: {membership.trouble}")
    ready = [*current, *membership.in_state(MemberState.STANDBY)]

    def held(member: Member) -> Position:
        """A newcomer that did not get the state yet is at step 0, whole: a checkpoint is ahead of that."""
        position = member.position
        return NOWHERE if position is None or position.step < durable else position

    # Who holds the most comes first, so that rank 0 holds the truth; then the old ranks.
    ready.sort(key=held, reverse=True)
    truth = held(ready[0]) if ready else NOWHERE
    holders = {m.id for m in ready if held(m) == truth} if truth != NOWHERE else set()
    chosen = choose(ready, holders, limits, now)
    enough = len(chosen) >= limits.min
    leaving = [m for m in current if m.drain is not None]
    if leaving and not (enough and any(m.id in holders for m in chosen)):
        until = min(m.drain.deadline for m in leaving if m.drain is not None)
        if holders and truth.step > durable and now < until:
            return Save(tuple(m.id for m in ready if m.id in holders), truth, until)
    if not enough:
        if leaving:
            return Release(tuple(m.id for m in leaving))
        return Wait(_shortage(membership, limits, len(chosen)), below_min_since + limits.start_s)
    if not current:
        others = wait_for_others(membership, limits, now)
        if others is not None:
            return Proceed(others)
    ids, before = tuple(m.id for m in chosen), tuple(m.shards for m in chosen)
    sources = tuple(rank for rank, m in enumerate(chosen) if m.id in holders)
    return Form(ids, sources, truth if sources else None, before)


def _shortage(membership: Membership, limits: Limits, ready: int) -> str:
    starting = len(membership.in_state(MemberState.STARTING))
    pending = len(membership.in_state(MemberState.REQUESTED))
    asked = f"asked Ray for {len(membership.members)}: {ready} ready, {starting} starting, {pending} pending"
    return f"{ready} of at least {limits.min} workers are ready; {asked}"
