"""Who the next generation is made of, and by when those who leave must have left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from worldline.control.decisions import Limits
from worldline.control.member import Drain, Member, MemberState
from worldline.control.membership import Membership
from worldline.worker.orders import EndKind


def last_call(drain: Drain, limits: Limits) -> float:
    """Until when a draining worker can still leave in order."""
    return max(drain.since, drain.deadline - limits.leave_s)


def choose(ready: Sequence[Member], holders: Collection[str], limits: Limits, now: float) -> list[Member]:
    """Who shall train next, in the order of `ready`, which is that of preference.

    holders: those with the line's state. A draining worker is chosen only while it has time: where min needs
    it, or where nobody else could give the state to the others.
    """
    able = [m for m in ready if m.suspicion is None]
    chosen = [m for m in able if m.drain is None][: limits.max]
    leaving = [m for m in able if m.drain is not None and now < last_call(m.drain, limits)]
    chosen += leaving[: max(0, limits.min - len(chosen))]
    if holders and not any(m.id in holders for m in chosen):
        # One more than max for the moment of handing over.
        giver = next((m for m in leaving if m.id in holders), None)
        if giver is not None:
            chosen = [giver, *chosen[: limits.num_shards - 1]]
    ids = {m.id for m in chosen}
    return [m for m in ready if m.id in ids]


def change_at(membership: Membership, chosen: Sequence[Member], limits: Limits, now: float) -> float:
    """When a healthy generation should give way to one of `chosen`, who are others than train now."""
    ids = {m.id for m in chosen}
    there = {m.id for m in membership.current}
    times = [
        now if m.drain is None else _leave_at(m.drain, len(chosen), len(there), limits, now)
        for m in membership.current
        if m.id not in ids
    ]
    if ids - there:
        waits = (wait_for_others(membership, limits, now), _pause_until(membership, limits, now))
        times.append(max((until for until in waits if until is not None), default=now))
    return min(times)


def _leave_at(drain: Drain, chosen: int, there: int, limits: Limits, now: float) -> float:
    """Once it is replaced; without that half of its time is used for waiting for somebody, or as much as can
    be if the others would be too few."""
    if chosen >= min(there, limits.max):
        return now
    until = last_call(drain, limits)
    return until if chosen < limits.min else min(until, (drain.since + drain.deadline) / 2)


def wait_for_others(membership: Membership, limits: Limits, now: float) -> float | None:
    """None if those who are ready should wait no longer for others, else until when."""
    standbys = [m for m in membership.in_state(MemberState.STANDBY) if m.stays]
    room = limits.max - sum(m.stays for m in membership.current)
    coming = membership.in_state(MemberState.REQUESTED) or membership.in_state(MemberState.STARTING)
    if len(standbys) >= room or not coming:
        return None
    until = min((m.since for m in standbys), default=now) + limits.gather_s
    return None if now >= until else until


def _pause_until(membership: Membership, limits: Limits, now: float) -> float | None:
    """Where the world has changed too often in the last minute, newcomers wait until it has not."""
    recent = [at for at in membership.changes if at > now - 60]
    return recent[-limits.changes_a_minute] + 60 if len(recent) >= limits.changes_a_minute else None


def doubtful(membership: Membership, limits: Limits) -> tuple[str, ...]:
    """The newcomers of a generation whose exchange broke before its first step although nobody was lost.

    The others trained together before. Empty where they would be too few alone.
    """
    if not membership.trouble or membership.lost or membership.furthest > membership.position:
        return ()
    current = membership.current
    if any(m.end is None or m.end.kind is not EndKind.BROKEN for m in current):
        return ()
    newcomers = tuple(m.id for m in current if m.generations == 1)
    return newcomers if len(current) - len(newcomers) >= max(1, limits.min) else ()


def superfluous(membership: Membership, limits: Limits) -> tuple[str, ...]:
    """Workers outside of the generation that are drained, or more than are wanted."""
    outside = [
        m
        for state in (MemberState.REQUESTED, MemberState.STARTING, MemberState.STANDBY)
        for m in reversed(membership.in_state(state))
    ]
    drained = [m.id for m in outside if m.drain is not None]
    surplus = sum(m.drain is None for m in membership.members.values()) - limits.target
    more = [m.id for m in outside if m.drain is None][: max(0, surplus)]
    return (*drained, *more)
