"""A run in numbers, from its logs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
class Summary:
    """rows_per_s: over the time spent in steps. elapsed_s: from the first attempt's start to the last step.

    goodput: the share of elapsed_s spent in steps that count; what is missing went into starting, recovering,
    saving and the time between attempts. data_s, compute_s, reduce_s: parts of step_s, summed over steps.
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
        incidents=tuple(incidents(events)),
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


def _elapsed(steps: Sequence[Step], events: Sequence[Event]) -> float | None:
    if not steps:
        return None
    first = steps[0]["time"] - steps[0]["step_s"]
    starts = [event.time for event in events if event.kind is EventKind.ATTEMPT_STARTED]
    elapsed = float(steps[-1]["time"] - min([first, *starts]))
    return elapsed if elapsed > 0 else None
