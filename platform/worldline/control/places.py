"""What each worker of a coming generation is told: its rank, its shards, where the state comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from worldline.control.decisions import Form, Limits
from worldline.control.membership import Gathering, Membership
from worldline.worker.orders import GenerationOrder, Invitation, Meeting
from worldline.world import Position, assign_near


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
    receivers = tuple(sorted(set(ranks) - set(sources)))
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
