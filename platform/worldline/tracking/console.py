"""What the person at the terminal sees: a live panel, or plain lines where nobody watches."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from worldline.events import Event
from worldline.tracking.ending import ending
from worldline.tracking.narrate import Narrator, Sentence, Tone
from worldline.tracking.numbers import duration, number, workers
from worldline.tracking.panel import NUM_SENTENCES, panel
from worldline.tracking.status import RunState, Status, read_status

PROGRESS_S = 5.0
REFRESH_HZ = 4.0


class Console(Protocol):
    """Protocol: `update` some times a second, `event` for each event, `close` once, all from one thread and
    all cheap. summary: how it ended in one line, and below it what else must be known; a run whose folder
    says how it ended gets a block with its numbers for that one line.
    """

    def update(self, status: Status, lr: float | None = None) -> None: ...

    def event(self, event: Event) -> None: ...

    def close(self, summary: str) -> None: ...


def make_console(stream: TextIO | None = None) -> Console:
    stream = sys.stderr if stream is None else stream
    return LiveConsole(stream) if stream.isatty() else PlainConsole(stream)


class Pace:
    """How fast steps come, smoothed over about the last half minute, pauses included; the start is not."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=64)

    def see(self, now: float, status: Status) -> None:
        step = status.step
        if not self._seen and status.state is not RunState.RUNNING:
            return
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
        self._narrator = Narrator()
        self._status: Status | None = None
        self._said_at = -math.inf
        self._said: tuple[RunState, int] | None = None

    def update(self, status: Status, lr: float | None = None) -> None:
        now = self._clock()
        first, self._status = self._status is None, status
        self._pace.see(now, status)
        if first:
            self._say(first_line(status))
            self._said_at, self._said = now, (status.state, status.step)
        unchanged = (status.state, status.step) == self._said
        begins = status.state is RunState.RUNNING and status.loss is None
        if now - self._said_at < PROGRESS_S or unchanged or begins:
            return
        self._said_at, self._said = now, (status.state, status.step)
        self._say(progress_line(status, lr, self._pace.seconds_left(now, status.step, status.steps)))

    def event(self, event: Event) -> None:
        status = self._status
        sentence = self._narrator.tell(event, status.max if status else event.world_after)
        if sentence is not None:
            self._say(f"{place(event.step, status.steps)}  {sentence.text}" if status else sentence.text)

    def close(self, summary: str) -> None:
        for line in last_lines(self._status, summary):
            self._say(line)

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveConsole:
    """A panel that redraws itself from the newest status, in its own thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace()
        self._narrator = Narrator()
        self._status: Status | None = None
        self._lr: float | None = None
        self._told: tuple[tuple[str, Sentence], ...] = ()
        self._starting = Spinner("dots", Text("starting", style="dim"))
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
        self._pace.see(self._clock(), status)

    def event(self, event: Event) -> None:
        sentence = self._narrator.tell(event, self._status.max if self._status else event.world_after)
        if sentence is None:
            return
        told, clock = self._told, time.strftime("%H:%M:%S", time.localtime(event.time))
        if sentence.continues and told:
            clock, before = told[-1]
            told, sentence = told[:-1], Sentence(f"{before.text}, {sentence.text}", Tone.PLAIN)
        self._told = (*told, (clock, sentence))[-NUM_SENTENCES:]

    def close(self, summary: str) -> None:
        lines = last_lines(self._status, summary)
        if self._status is not None:
            self._status = _final(self._status) or self._status
        self._live.stop()
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        status = self._status
        if status is None:
            return self._starting
        left = self._pace.seconds_left(self._clock(), status.step, status.steps)
        return panel(status, self._lr, left, self._told, self._console.width)


def first_line(status: Status) -> str:
    goal = "" if status.steps is None else f" {status.steps} steps"
    attempt = f" attempt {status.attempt}," if status.attempt > 1 else ""
    sizes = f"{status.min}" if status.min == status.max else f"{status.min} to {status.max}"
    plural = "" if status.max == 1 else "s"
    return f"{status.run}:{attempt}{goal} on {sizes} worker{plural}, in {status.storage}"


def progress_line(status: Status, lr: float | None, seconds_left: float | None) -> str:
    parts = [place(status.step, status.steps)]
    if status.state is not RunState.RUNNING:
        parts.append(status.state.lower() + (f": {status.reason}" if status.reason else ""))
        return "  ".join(parts)
    parts += [
        f"loss {number(status.loss):<6}",
        f"lr {number(lr, significant=3):<8}",
        f"{number(status.rows_per_s, 0):>5} rows/s",
        workers(status.world, status.max),
    ]
    if status.standbys:
        parts.append(f"{status.standbys} standing by")
    if status.leaving:
        parts.append(f"{status.leaving} leaving")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def place(step: int, steps: int | None) -> str:
    return f"step {step}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"


def last_lines(status: Status | None, summary: str) -> list[str]:
    final = None if status is None else _final(status)
    said = summary.splitlines()
    return said if final is None else ending(final, said[1:])


def _final(status: Status) -> Status | None:
    """What the run's folder says of this attempt's end; None if nothing, or if it is another driver's now."""
    final = read_status(Path(status.storage))
    if final is None or not final.state.over or final.attempt != status.attempt:
        return None
    return replace(final, storage=status.storage)
