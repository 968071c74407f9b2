"""What the person at the terminal sees: a live panel, or plain lines where nobody watches."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from worldline.events import Event, EventKind
from worldline.tracking.incidents import INCIDENT_KINDS
from worldline.tracking.status import RunState, Status

PROGRESS_S = 5.0
REFRESH_HZ = 4.0
NUM_EVENTS = 5

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


class Console(Protocol):
    """Protocol: `update` some times a second, `event` for each event, `close` once with the run's last word,
    all from one thread and all cheap."""

    def update(self, status: Status, lr: float | None = None) -> None: ...

    def event(self, event: Event) -> None: ...

    def close(self, summary: str) -> None: ...


def make_console(stream: TextIO | None = None) -> Console:
    stream = sys.stderr if stream is None else stream
    return LiveConsole(stream) if stream.isatty() else PlainConsole(stream)


class Pace:
    """How fast steps come, smoothed over about the last half minute, pauses included."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=64)

    def see(self, now: float, step: int) -> None:
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # a restore took it back
        if not self._seen or now - self._seen[-1][0] >= 0.5:
            self._seen.append((now, step))

    def seconds_left(self, now: float, step: int, steps: int | None) -> float | None:
        if steps is None or not self._seen or step <= self._seen[0][1] or now <= self._seen[0][0]:
            return None
        return (steps - step) * (now - self._seen[0][0]) / (step - self._seen[0][1])


class PlainConsole:
    """Lines for a log file: the start, each event, progress now and then, the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._pace = Pace()
        self._said_at = -math.inf
        self._said: tuple[RunState, int] | None = None
        self._started = False

    def update(self, status: Status, lr: float | None = None) -> None:
        now = self._clock()
        self._pace.see(now, status.step)
        if not self._started:
            self._started = True
            self._say(
                f"{status.run}: attempt {status.attempt}, step {_of(status.step, status.steps)}, "
                f"world {status.min} to {status.max}, in {status.storage}"
            )
            self._said_at, self._said = now, (status.state, status.step)
        if now - self._said_at < PROGRESS_S or (status.state, status.step) == self._said:
            return
        self._said_at, self._said = now, (status.state, status.step)
        self._say(progress_line(status, lr, self._pace.seconds_left(now, status.step, status.steps)))

    def event(self, event: Event) -> None:
        self._say(event_line(event))

    def close(self, summary: str) -> None:
        self._say(summary)

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveConsole:
    """A panel that redraws itself from the newest status, in its own thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace()
        self._status: Status | None = None
        self._lr: float | None = None
        self._events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self._console = RichConsole(file=stream)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=REFRESH_HZ,
            redirect_stdout=False,  # what the user prints stays on their stdout
        )
        self._live.start()

    def update(self, status: Status, lr: float | None = None) -> None:
        self._status, self._lr = status, lr
        self._pace.see(self._clock(), status.step)

    def event(self, event: Event) -> None:
        self._events.append(event)

    def close(self, summary: str) -> None:
        self._live.stop()
        self._console.print(summary, markup=False, highlight=False)

    def _draw(self) -> RenderableType:
        status = self._status
        if status is None:
            return Text("starting ...", style="dim")
        left = self._pace.seconds_left(self._clock(), status.step, status.steps)
        return panel(status, self._lr, left, list(self._events))


def panel(status: Status, lr: float | None, seconds_left: float | None, events: list[Event]) -> Panel:
    color = _COLORS[status.state]
    head = Table.grid(expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    state = Text(status.state.value, style=f"bold {color}")
    if status.reason:
        state.append(f"  {status.reason}", style="default")
    head.add_row(state, Text(f"attempt {status.attempt}  generation {status.generation}", style="dim"))

    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column()
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    bar.add_row(
        Text(f"step {_of(status.step, status.steps)}", style="bold"),
        ProgressBar(
            total=status.steps or 1, completed=status.step if status.steps else 0, complete_style=color
        ),
        f"ETA {duration(seconds_left)}",
    )

    values = Table.grid(expand=True)
    cells = [
        ("loss", number(status.loss)),
        ("lr", number(lr)),
        ("rows/s", number(status.rows_per_s, 0)),
        ("world", f"{status.world} of {status.max}"),
        ("goodput", "-" if status.goodput is None else f"{status.goodput:.1%}"),
        ("incidents", str(status.incidents)),
    ]
    for _ in cells:
        values.add_column(ratio=1)
    values.add_row(*(Text(name, style="dim") for name, _ in cells))
    values.add_row(*(Text(value, style="bold") for _, value in cells))

    parts: list[RenderableType] = [head, bar, values]
    if events:
        parts.append(Text())
        parts += [_event_text(event) for event in events]
    return Panel(Group(*parts), title=status.run, title_align="left", border_style=color, padding=(0, 1))


def progress_line(status: Status, lr: float | None, seconds_left: float | None) -> str:
    parts = [
        f"step {_of(status.step, status.steps)}",
        f"loss {number(status.loss)}",
        f"lr {number(lr)}",
        f"{number(status.rows_per_s, 0)} rows/s",
        f"world {status.world} of {status.max}",
        f"ETA {duration(seconds_left)}",
    ]
    if status.state is not RunState.RUNNING:
        parts.insert(0, status.state.value + (f" ({status.reason})" if status.reason else ""))
    return "  ".join(parts)


def event_line(event: Event) -> str:
    parts = [f"{event.kind.value}: step {event.step}, generation {event.generation}"]
    if event.world_before != event.world_after:
        parts.append(f"world {event.world_before} -> {event.world_after}")
    if event.workers:
        parts.append(" ".join(event.workers))
    if event.seconds is not None:
        parts.append(f"{event.seconds:.3f} s")
    line = ", ".join(parts)
    return f"{line}: {event.reason}" if event.reason else line


def number(value: float | None, digits: int | None = None) -> str:
    """Four significant digits, or so many behind the point; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if digits is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _of(step: int, steps: int | None) -> str:
    return f"{step}" if steps is None else f"{step}/{steps}"


def _event_text(event: Event) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    color = "red" if event.kind in INCIDENT_KINDS or event.kind is EventKind.FAILED else "default"
    text = Text(f"{clock}  ", style="dim", no_wrap=True, overflow="ellipsis")
    return text.append(event_line(event), style=color)
