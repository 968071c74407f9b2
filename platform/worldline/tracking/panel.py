"""The live panel: one frame of it, drawn from a status and the newest sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from worldline.tracking.narrate import Sentence, Tone
from worldline.tracking.numbers import duration, number
from worldline.tracking.status import RunState, Status

WIDTH = 100
NUM_SENTENCES = 5
MAX_DOTS = 8

_CALM = frozenset({RunState.RUNNING, RunState.STARTING, RunState.FINISHED})
_COLORS = {
    RunState.RUNNING: "green",
    RunState.FINISHED: "green",
    RunState.STARTING: "cyan",
    RunState.WAITING: "yellow",
    RunState.RECOVERING: "yellow",
    RunState.DRAINING: "yellow",
    RunState.FAILED: "red",
    RunState.STOPPED: "red",
}
_TONES = {Tone.GOOD: "green", Tone.PLAIN: "default", Tone.BAD: "red"}


def panel(
    status: Status,
    lr: float | None,
    seconds_left: float | None,
    told: Sequence[tuple[str, Sentence]],
    width: int = WIDTH,
) -> Panel:
    """told: time of day and sentence. Its height never changes, so that nothing on the screen jumps."""
    color = _COLORS[status.state]
    attempt = f"attempt {status.attempt}" if status.attempt > 1 else ""
    parts = [_head(status, attempt, color), _bar(status, seconds_left, color), Text(), _values(status, lr)]
    parts.append(Text())
    parts += [_line(clock, sentence) for clock, sentence in told]
    parts += [Text()] * (NUM_SENTENCES - len(told))
    return Panel(
        Group(*parts),
        title=Text(status.run, style="bold"),
        title_align="left",
        border_style="dim" if status.state in _CALM else color,
        padding=(0, 1),
        width=min(width, WIDTH),
    )


def _head(status: Status, attempt: str, color: str) -> RenderableType:
    head = Table.grid(expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right")
    state = Text(status.state.lower(), style=color)
    if status.reason:
        state.append(f": {status.reason}", style="default")
    head.add_row(state, Text(attempt, style="dim"))
    return head


def _bar(status: Status, seconds_left: float | None, color: str) -> RenderableType:
    bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    if status.steps is None:
        bar.add_row(f"step {status.step}", "", "")
        return bar
    left = "" if seconds_left is None or status.state.over else f"{duration(seconds_left)} left"
    bar.add_row(
        f"step {status.step:>{len(str(status.steps))}} of {status.steps}",
        ProgressBar(
            total=status.steps, completed=status.step, complete_style=color, finished_style=color, style="dim"
        ),
        left,
    )
    return bar


def _values(status: Status, lr: float | None) -> RenderableType:
    world = f"{status.world} of {status.max}"
    if status.state.over:
        world = "-"
    elif status.max <= MAX_DOTS:
        world = "●" * status.world + "○" * (status.max - status.world) + f" {world}"
    if status.standbys:
        world += f" +{status.standbys}"
    if status.leaving:
        world += f" -{status.leaving}"
    cells = [
        ("loss", number(status.loss)),
        ("lr", number(lr, significant=3)),
        ("rows/s", number(status.rows_per_s, 0)),
        ("workers", world),
        ("goodput", "-" if status.goodput is None else f"{status.goodput:.0%}"),
        ("incidents", str(status.incidents)),
    ]
    values = Table.grid(expand=True)
    for name, _ in cells:
        values.add_column(ratio=2 if name == "workers" else 1, no_wrap=True)
    values.add_row(*(Text(name, style="dim") for name, _ in cells))
    values.add_row(*(Text(value, style="bold") for _, value in cells))
    return values


def _line(clock: str, sentence: Sentence) -> Text:
    text = Text(f"{clock}  ", style="dim", no_wrap=True, overflow="ellipsis")
    return text.append(sentence.text.partition("\n")[0], style=_TONES[sentence.tone])
