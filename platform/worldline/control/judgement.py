"""Who must go because a generation does not go on: from what its members say they do. Pure."""

from __future__ import annotations

from worldline.control.decisions import Condemn, Decision, Inquire, Limits, Proceed
from worldline.control.membership import Membership
from worldline.health.hang import accounts, diagnose

ASKED_AT_ONCE = 500
"""More members than that have longer to answer."""


def inquire(membership: Membership, limits: Limits, patience_s: float, now: float) -> Decision | None:
    """What to do about members that are silent, or a generation that stands still; None if nothing is amiss.

    patience_s: how long it may stand still. Nobody is condemned unheard: who is to blame shows only in what
    the others wait for.
    """
    silent = [m for m in membership.training if m.suspicion is not None and m.suspicion.silent]
    inquiry = membership.inquiry
    if inquiry is None:
        if not silent and now < membership.moved + patience_s:
            return None
        return Inquire(tuple(m.id for m in membership.current if m not in silent))
    until = inquiry.since + limits.inquire_s * max(1.0, len(inquiry.ids) / ASKED_AT_ONCE)
    if not inquiry.complete and now < until:
        return Proceed(until)
    return _condemn(membership)


def _condemn(membership: Membership) -> Condemn:
    assert membership.inquiry is not None
    current = {m.rank: m for m in membership.current}
    answers = membership.inquiry.answers
    conditions = {
        rank: None if m.suspicion is not None and m.suspicion.silent else answers.get(m.id)
        for rank, m in current.items()
    }
    names = {rank: f"{m.id} on {m.hello.ip if m.hello else m.node}" for rank, m in current.items()}
    verdict = diagnose(conditions, membership.generation, names)
    certain = not verdict.tied and len(verdict.culprits) < len(current)
    culprits = verdict.culprits if certain else ()
    reasons = {
        current[rank].id: suspicion.reason
        if (suspicion := current[rank].suspicion) is not None
        else verdict.reasons[rank]
        for rank in culprits
    }
    alive = bool(culprits) and all(conditions[rank] is not None for rank in culprits)
    return Condemn(reasons, alive, verdict.text, accounts(conditions, verdict, names))
