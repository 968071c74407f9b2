"""What a worker is doing at this moment, told by a thread that answers while the training thread is stuck."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from worldline.collective.operations import Operation
from worldline.health import stack

if TYPE_CHECKING:
    from worldline.collective.group import Group


@dataclass(frozen=True)
class Condition:
    """One worker, as it is when it is asked.

    generation: the newest that it was ordered into. step: completed steps. phase: what it does, for phase_s
    seconds. waits_in: the operation it waits in, for waits_s seconds; None while it waits in none. entered:
    the last operations of this generation, lane by lane, the newest of a lane last; unfinished: those of them
    that are under way. where: `file:line in function` of the training thread's innermost frame in the job's
    own code, or of any if there is none there. stack: the thread's innermost frames.
    """

    generation: int
    step: int
    phase: str
    phase_s: float
    waits_in: Operation | None = None
    waits_s: float = 0.0
    entered: tuple[Operation, ...] = ()
    unfinished: tuple[Operation, ...] = ()
    where: str = ""
    stack: str = ""

    def has_entered(self, operation: Operation) -> bool:
        """Whether this rank came as far in the operation's lane, with whatever operation."""
        return any(o.lane == operation.lane and o.sequence >= operation.sequence for o in self.entered)


def capture(
    thread_id: int,
    group: Group | None,
    *,
    generation: int,
    step: int,
    phase: str,
    since: float,
    now: float,
) -> Condition:
    """The condition of the worker that trains in thread `thread_id`; called from another one.

    group: the one of this generation, None while there is none. since, now: seconds of `time.monotonic`.
    """
    waiting = group.log.waiting if group is not None else None
    frames = stack.frames_of(thread_id)
    return Condition(
        generation=generation,
        step=step,
        phase=phase,
        phase_s=max(0.0, now - since),
        waits_in=None if waiting is None else waiting[0],
        waits_s=0.0 if waiting is None else max(0.0, now - waiting[1]),
        entered=group.log.entered() if group is not None else (),
        unfinished=group.unfinished() if group is not None else (),
        where=stack.where(frames, _library_folders()),
        stack=stack.text(frames),
    )


_library_folders = lru_cache(stack.library_folders)
