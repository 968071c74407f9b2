"""A run in numbers, from its logs. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from worldline.events import Event, EventKind
from worldline.tracking.incidents import Incident, incidents

Step = Mapping[str, Any]


@dataclass(frozen=True)
class Epoch:
    """rows: all that were trained in it, as the steps' own counts add up."""

    epoch: int
    steps: int
    rows: int


@dataclass(frozen=True)
class Stretch:
    """The steps [first, last] of one generation. step_s: their median."""

    attempt: int
    generation: int
    first: int
    last: int
    world: int
    step_s: float
    rows_per_s: float


@dataclass(frozen=True)
class Summary:
    """rows_per_s: over the time spent in steps. elapsed_s: from the first attempt's start to the last step.

    goodput: the share of elapsed_s spent in steps that count; what is missing went into starting, recovering,
    saving and the time between attempts. data_s, compute_s, reduce_s: parts of step_s, summed over steps.
    resumed_s: for each incident, from its event to the end of the first step of the next generation, where it
    was recovered from.
    """

    num_steps: int
    rows: int
    epochs: tuple[Epoch, ...]
    attempts: int
    generations: int
    worlds: tuple[int, ...]
    first_loss: float | None
    last_loss: float | None
    rows_per_s: float | None
    step_s: float
    data_s: float
    compute_s: float
    reduce_s: float
    elapsed_s: float | None
    goodput: float | None
    num_skipped: int
    incidents: tuple[Incident, ...]
    resumed_s: tuple[float | None, ...]
    stretches: tuple[Stretch, ...]
    evaluations: tuple[Mapping[str, Any], ...]
    final_digest: tuple[int, str] | None
    outcome: str


def summarize(
    steps: Sequence[Step], events: Sequence[Event], evaluations: Sequence[Mapping[str, Any]]
) -> Summary:
    """final_digest: (step, digest) of the last state digest that was taken."""
    step_s = math.fsum(step["step_s"] for step in steps)
    rows = sum(step["rows"] for step in steps)
    elapsed_s = _elapsed(steps, events)
    digests = [(int(step["step"]), str(step["state_digest"])) for step in steps if step.get("state_digest")]
    ends = [event for event in events if event.kind in _ENDS]
    found = incidents(events)
    return Summary(
        num_steps=len(steps),
        rows=rows,
        epochs=_epochs(steps),
        attempts=max((step["attempt"] for step in steps), default=0),
        generations=len({step["generation"] for step in steps}),
        worlds=tuple(sorted({step["world"] for step in steps})),
        first_loss=steps[0]["loss"] if steps else None,
        last_loss=steps[-1]["loss"] if steps else None,
        rows_per_s=rows / step_s if step_s > 0 else None,
        step_s=step_s,
        data_s=math.fsum(step["data_s"] for step in steps),
        compute_s=math.fsum(step["compute_s"] for step in steps),
        reduce_s=math.fsum(step["reduce_s"] for step in steps),
        elapsed_s=elapsed_s,
        goodput=min(step_s / elapsed_s, 1.0) if elapsed_s else None,
        num_skipped=sum(bool(step.get("skipped")) for step in steps),
        incidents=tuple(found),
        resumed_s=tuple(_resumed_s(incident, steps) for incident in found),
        stretches=tuple(_stretches(steps)),
        evaluations=tuple(evaluations),
        final_digest=digests[-1] if digests else None,
        outcome=_ENDS[ends[-1].kind] if ends and ends[-1] is _last_mark(events) else "not ended",
    )


_ENDS = {EventKind.FINISHED: "finished", EventKind.FAILED: "failed", EventKind.STOPPED: "stopped"}


def _last_mark(events: Sequence[Event]) -> Event | None:
    """The newest begin or end of an attempt."""
    marks = [event for event in events if event.kind in _ENDS or event.kind is EventKind.ATTEMPT_STARTED]
    return marks[-1] if marks else None


def _epochs(steps: Sequence[Step]) -> tuple[Epoch, ...]:
    counts: dict[int, tuple[int, int]] = {}
    for step in steps:
        num_steps, rows = counts.get(step["epoch"], (0, 0))
        counts[step["epoch"]] = num_steps + 1, rows + step["rows"]
    return tuple(Epoch(epoch, *count) for epoch, count in sorted(counts.items()))


def _resumed_s(incident: Incident, steps: Sequence[Step]) -> float | None:
    if incident.recovery_s is None:
        return None
    when, broken = incident.event.time, incident.event.generation
    ends = (step["time"] for step in steps if step["generation"] > broken and step["time"] >= when)
    first = next(ends, None)
    return None if first is None else float(first - when)


def _stretches(steps: Sequence[Step]) -> Iterator[Stretch]:
    for (attempt, generation), found in groupby(steps, lambda step: (step["attempt"], step["generation"])):
        group = list(found)
        took = math.fsum(step["step_s"] for step in group)
        yield Stretch(
            attempt,
            generation,
            group[0]["step"],
            group[-1]["step"],
            group[0]["world"],
            statistics.median(step["step_s"] for step in group),
            sum(step["rows"] for step in group) / took if took > 0 else 0.0,
        )


def _elapsed(steps: Sequence[Step], events: Sequence[Event]) -> float | None:
    if not steps:
        return None
    first = steps[0]["time"] - steps[0]["step_s"]
    starts = [event.time for event in events if event.kind is EventKind.ATTEMPT_STARTED]
    elapsed = float(steps[-1]["time"] - min([first, *starts]))
    return elapsed if elapsed > 0 else None
