"""What went wrong in a run, and how long it took to go on. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worldline.events import Event, EventKind

INCIDENT_KINDS = frozenset(
    {
        EventKind.WORKER_LOST,
        EventKind.WORKER_START_FAILED,
        EventKind.HANG,
        EventKind.COLLECTIVE_FAILED,
        EventKind.TASK_ERROR,
        EventKind.NONFINITE,
        EventKind.CHECKPOINT_FAILED,
        EventKind.CHECKPOINT_PASSED_OVER,
    }
)
_BREAKING = frozenset(
    {EventKind.WORKER_LOST, EventKind.HANG, EventKind.COLLECTIVE_FAILED, EventKind.TASK_ERROR}
)


@dataclass(frozen=True)
class Incident:
    """One thing that went wrong. recovery_s: until the next generation was formed, where it broke one."""

    event: Event
    recovery_s: float | None = None


def incidents(events: Iterable[Event]) -> list[Incident]:
    """Every incident in order; those that broke a generation with the time until the next one was formed.

    That time is the forming's own measure where it has one, else the difference of the controller's clock.
    """
    found: list[Incident] = []
    open_since = 0  # incidents from here on have not been recovered from
    for event in events:
        if event.kind in INCIDENT_KINDS:
            found.append(Incident(event))
        elif event.kind is EventKind.GENERATION_FORMED:
            for k in range(open_since, len(found)):
                broke = found[k].event
                if broke.kind in _BREAKING:
                    took = event.seconds if event.seconds is not None else event.time - broke.time
                    found[k] = Incident(broke, took)
            open_since = len(found)
        elif event.kind is EventKind.ATTEMPT_STARTED:
            open_since = len(found)  # the attempt before ended with them
    return found
