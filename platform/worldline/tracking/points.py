"""From the run's logs to the points of its curves. A point is a pure function of its line."""

from __future__ import annotations

import math
import posixpath
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from worldline.events import Event, EventKind
from worldline.tracking.incidents import INCIDENT_KINDS

CURVES = ("loss", "lr", "grad_norm", "step_s", "data_s", "compute_s", "reduce_s", "world", "generation")
DERIVED = ("rows_per_s", "nonfinite_steps", "incidents", "recovery_s")


class Point(NamedTuple):
    """One value of one curve. The same line always gives the same point, so sending it twice is harmless on
    a server whose key is the whole point."""

    key: str
    value: float
    step: int
    time_ms: int


class Points:
    """Turns lines into points.

    Protocol: `event` and `evaluation` take lines as they come; `step`, called for each step in order, gives
    that step's points together with what the events and evaluations before it add. `rest` gives what no
    later step came for. Non-finite values give no point: they are counted in `nonfinite_steps`.
    Counters (`nonfinite_steps`, `incidents`, and `recovery_s`, the seconds of the recovery) have a point only
    at the steps where they change: a step has at most one point of a curve.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._evaluations: deque[Mapping[str, Any]] = deque()
        self._num_nonfinite = 0
        self._num_incidents = 0
        self._last_ms = 0

    def event(self, event: Event) -> None:
        if event.kind in INCIDENT_KINDS or event.kind is EventKind.GENERATION_FORMED:
            self._events.append(event)

    def evaluation(self, fields: Mapping[str, Any]) -> None:
        self._evaluations.append(fields)

    def step(self, fields: Mapping[str, Any]) -> list[Point]:
        step, time_ms = int(fields["step"]), round(fields["time"] * 1000)
        self._last_ms = time_ms
        values = {key: float(fields[key]) for key in CURVES}
        if fields["step_s"] > 0:
            values["rows_per_s"] = fields["rows"] / fields["step_s"]
        for name, value in fields.get("metrics", {}).items():
            values[metric_name(name)] = float(value)
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            self._num_nonfinite += 1
            finite["nonfinite_steps"] = self._num_nonfinite
        finite |= self._counters(step)
        points = [Point(key, value, step, time_ms) for key, value in finite.items()]
        return points + self._validation(step, time_ms)

    def rest(self) -> list[Point]:
        return self._validation(None, self._last_ms)

    @property
    def num_incidents(self) -> int:
        """All incidents so far, also those that no step has followed yet."""
        return self._num_incidents + sum(event.kind in INCIDENT_KINDS for event in self._events)

    def _counters(self, step: int) -> dict[str, float]:
        """What the events before this step add."""
        counters: dict[str, float] = {}
        while self._events and self._events[0].step < step:
            event = self._events.popleft()
            if event.kind in INCIDENT_KINDS:
                self._num_incidents += 1
                counters["incidents"] = self._num_incidents
            elif "incidents" in counters and event.seconds is not None:
                counters["recovery_s"] = counters.get("recovery_s", 0.0) + event.seconds
        return counters

    def _validation(self, up_to: int | None, time_ms: int) -> list[Point]:
        points = []
        while self._evaluations and (up_to is None or self._evaluations[0]["step"] <= up_to):
            fields = self._evaluations.popleft()
            for name, value in fields["metrics"].items():
                if math.isfinite(value):
                    points.append(Point(f"val_{_clean(name)}", float(value), int(fields["step"]), time_ms))
        return points


def metric_name(name: str) -> str:
    """The curve of a task's metric: its own name, unless that is one of ours."""
    name = _clean(name)
    taken = name in CURVES or name in DERIVED or name.startswith("val_")
    return f"task_{name}" if taken else name


def _clean(name: str) -> str:
    """A name MLflow takes: certain characters, not too long, no path that means another."""
    name = re.sub(r"[^\w\-. /:]", "_", name)[:200]
    path = posixpath.normpath(name)
    return (
        name
        if path == name and not path.startswith(("/", "..")) and path != "."
        else re.sub(r"[/.]", "_", name)
    )
