"""The picture of a run: its loss over the steps, and under it the world that changed meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldline.events import Event, EventKind
from worldline.tracking.summary import Summary

INK, MUTED, GRID = "#1b1f24", "#6a737d", "#e6e8eb"
BLUE, PALE, RED, GREEN, AMBER = "#1f5fbf", "#b9cfee", "#c4314b", "#1f8a5b", "#b7791f"
MAX_POINTS = 4000
MAX_LINES = 60  # marks with a line through the curve; more would hide it
MAX_NOTES = 4  # marks with words beside them; more would hide each other

Step = Mapping[str, Any]


def draw(
    path: Path,
    title: str,
    steps: Sequence[Step],
    events: Sequence[Event],
    evaluations: Sequence[Step],
    summary: Summary,
) -> None:
    """Write the picture as PNG. Without pyplot: no global state, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.2), dpi=144, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    loss, world = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    for axes in (loss, world):
        axes.set_axisbelow(True)
        axes.grid(color=GRID, linewidth=0.8)
        axes.tick_params(colors=MUTED, labelsize=9, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    loss.set_title(title, loc="left", color=INK, fontsize=14, fontweight="bold", pad=28)
    loss.set_title(subtitle(summary), loc="right", color=MUTED, fontsize=10, pad=28)
    loss.set_ylabel("loss", color=INK, fontsize=10)
    world.set_ylabel("workers", color=INK, fontsize=10)
    world.set_xlabel("step", color=INK, fontsize=10)
    world.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))
    world.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    if not steps:
        loss.text(0.5, 0.5, "no completed step yet", transform=loss.transAxes, ha="center", color=MUTED)
        figure.savefig(path, format="png")
        return

    numbers = [step["step"] for step in steps]
    losses = [step["loss"] if math.isfinite(step["loss"]) else math.nan for step in steps]
    smooth = smoothed(losses, len(losses) // 50)
    noisy = len(losses) >= 100
    if noisy:
        loss.plot(*thinned(numbers, losses), color=PALE, linewidth=0.9, label="each step")
    loss.plot(
        *thinned(numbers, smooth if noisy else losses),
        color=BLUE,
        linewidth=1.8,
        label="smoothed" if noisy else "loss",
    )
    validation = [(e["step"], e["metrics"]["loss"]) for e in evaluations if "loss" in e["metrics"]]
    if validation:
        loss.plot(
            *zip(*validation, strict=True), "o-", color=AMBER, markersize=4, linewidth=1, label="validation"
        )

    worlds = [step["world"] for step in steps]
    edges, heights = runs(numbers, worlds)
    world.stairs(heights, edges, color=BLUE, linewidth=1.6, baseline=None)
    world.stairs(heights, edges, color=PALE, alpha=0.45, fill=True)
    world.set_ylim(0, max(worlds) + 0.8)
    losses_at, joins_at = marks(events)
    for at, color, marker, name in (
        (losses_at, RED, "v", "worker lost"),
        (joins_at, GREEN, "^", "workers joined"),
    ):
        for step in at if len(at) <= MAX_LINES else ():
            loss.axvline(step, color=color, linewidth=0.8, alpha=0.3)
            world.axvline(step, color=color, linewidth=0.8, alpha=0.3)
        if at:
            heights_at = [world_at(step, edges, heights) + 0.35 for step in at]
            world.plot(at, heights_at, marker, color=color, markersize=5, linestyle="none")
            loss.plot([], [], marker, color=color, markersize=6, linestyle="none", label=name)
    span = numbers[-1] - numbers[0] + 1
    told = notes(events, summary)
    for row, (step, text, bad) in enumerate(told if len(told) <= MAX_NOTES else ()):
        late = step - numbers[0] > 0.65 * span  # written to the left, where there is room
        loss.annotate(
            text,
            (step, 0.97 - 0.085 * row),
            xycoords=("data", "axes fraction"),
            xytext=(-6 if late else 6, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            va="top",
            color=RED if bad else GREEN,
            fontsize=9,
            annotation_clip=True,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        ).set_in_layout(False)
    loss.legend(
        loc="lower left",
        bbox_to_anchor=(-0.012, 1.0),
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handletextpad=0.5,
        columnspacing=1.6,
    )
    loss.set_xlim(numbers[0] - 1 - 0.01 * span, numbers[-1] + 0.01 * span)
    figure.align_ylabels()
    figure.savefig(path, format="png")


def subtitle(summary: Summary) -> str:
    worlds = [stretch.world for stretch in summary.stretches]
    changes = [size for k, size in enumerate(worlds) if k == 0 or size != worlds[k - 1]]
    if len(changes) > 7:
        changes = [min(changes), max(changes)]
        history = " to ".join(map(str, changes))
    else:
        history = " \N{RIGHTWARDS ARROW} ".join(map(str, changes))
    workers = f"{history} worker{'' if changes == [1] else 's'}"
    return f"{summary.num_steps:,} steps on {workers}, {summary.rows:,} rows"


def notes(events: Sequence[Event], summary: Summary) -> list[tuple[int, str, bool]]:
    """What is written beside the marks, in order: the step, the words, whether something went wrong."""
    resumed = dict(zip((incident.event for incident in summary.incidents), summary.resumed_s, strict=True))
    told = []
    for event in events:
        if event.kind is EventKind.WORKER_LOST:
            seconds = resumed.get(event)
            after = "" if seconds is None else f", next step done {seconds:.2f} s later"
            told.append((event.step, f"worker lost{after}", True))
        elif _has_grown(event):
            pause = "" if event.seconds is None else f", others paused {event.seconds:.2f} s"
            told.append((event.step, f"joined{pause}", False))
    return told


def marks(events: Sequence[Event]) -> tuple[list[int], list[int]]:
    """The steps after which workers were lost, and those after which the world grew."""
    lost = [event.step for event in events if event.kind is EventKind.WORKER_LOST]
    return lost, [event.step for event in events if _has_grown(event)]


def _has_grown(event: Event) -> bool:
    return event.kind is EventKind.GENERATION_FORMED and 0 < event.world_before < event.world_after


def runs(numbers: Sequence[int], worlds: Sequence[int]) -> tuple[list[float], list[int]]:
    """Edges and heights of the stretches in which the world stayed the same; step t covers (t-1, t]."""
    edges, heights = [numbers[0] - 1.0], [worlds[0]]
    for number, size in zip(numbers, worlds, strict=True):
        if size != heights[-1]:
            edges.append(number - 1.0)
            heights.append(size)
    return [*edges, float(numbers[-1])], heights


def world_at(step: int, edges: Sequence[float], heights: Sequence[int]) -> int:
    """The larger world at this border, so that a mark stands above the line and not inside it."""
    beside = [h for h, a, b in zip(heights, edges, edges[1:], strict=False) if a <= step <= b]
    return max(beside, default=heights[-1])


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over about `window` values; values that are not finite are left out."""
    if window < 3:
        return list(values)
    half = window // 2
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    out = []
    for k in range(len(values)):
        low, high = max(k - half, 0), min(k + half + 1, len(values))
        count = counts[high] - counts[low]
        out.append((sums[high] - sums[low]) / count if count else math.nan)
    return out


def thinned(x: Sequence[int], y: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most about `MAX_POINTS` of them: of each stretch the smallest and the largest: no spike is lost."""
    width = math.ceil(2 * len(x) / MAX_POINTS)
    if width <= 2:
        return list(x), list(y)
    keep: list[int] = []
    for start in range(0, len(x), width):
        finite = [k for k in range(start, min(start + width, len(x))) if math.isfinite(y[k])]
        if finite:
            keep += sorted({min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)})
    return [x[k] for k in keep], [y[k] for k in keep]
