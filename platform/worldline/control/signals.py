"""What reaches the controller from outside, as values in one queue."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from worldline.control.causes import Cause
from worldline.events import StepRecord
from worldline.health.condition import Condition
from worldline.worker.orders import GenerationEnd, Hello, Reports


@dataclass(frozen=True)
class Arrived:
    """A requested worker has a place: its process runs, and now imports and builds."""

    id: str
    pid: int
    node: str
    ip: str


@dataclass(frozen=True)
class Cut:
    """A worker's lifeline ended: its process is gone."""

    id: str


@dataclass(frozen=True)
class Silent:
    """A worker has given no sign of life for `seconds`: it is frozen, or cannot be reached."""

    id: str
    seconds: float


@dataclass(frozen=True)
class Heard:
    """A silent worker gave a sign of life again."""

    id: str


@dataclass(frozen=True)
class Unavailable:
    """Ray cannot reach a worker, for now or for ever."""

    id: str
    reason: str


@dataclass(frozen=True)
class Ready:
    """A requested worker is built and checked."""

    id: str
    hello: Hello


@dataclass(frozen=True)
class StartFailed:
    """A requested worker's preparation raised; its process lives and is of no use."""

    id: str
    reason: str


@dataclass(frozen=True)
class Lost:
    """A worker's process or node is gone. cause: what Ray says of it, where it says something."""

    id: str
    reason: str
    cause: Cause | None = None


@dataclass(frozen=True)
class NodeDraining:
    """A node shall end. lead_s: how long it may be expected to live from now."""

    node: str
    lead_s: float
    reason: str


@dataclass(frozen=True)
class Degraded:
    """Something is amiss that stops nothing, and somebody may want to mend it."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """A generation ended for a worker."""

    id: str
    end: GenerationEnd


@dataclass(frozen=True)
class Fetched:
    """A worker's reports, or None if it could not give any."""

    id: str
    reports: Reports | None


@dataclass(frozen=True)
class Described:
    """What a worker's training thread does, or None if it could not say."""

    id: str
    generation: int
    condition: Condition | None


@dataclass(frozen=True)
class StepsFetched:
    """Step records asked for to fill a gap, or None if the worker could not give any."""

    id: str
    records: tuple[StepRecord, ...] | None


@dataclass(frozen=True)
class SaveEnded:
    """A checkpoint is committed, or not: `error` says why."""

    step: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class StopRequested:
    """The run shall end in order; exit_code is what the driver then ends with."""

    reason: str
    exit_code: int


@dataclass(frozen=True)
class LeaseLost:
    """Another driver has the run: nothing more may be written."""

    reason: str


Answer = Callable[[bool, str], None]
"""Tells who asked whether it will be done, and a sentence about it. From any thread, at once; the first call
counts."""


@dataclass(frozen=True)
class Resize:
    """The world shall have `workers` members from now on. by: who asks for it."""

    workers: int
    by: str
    answer: Answer


@dataclass(frozen=True)
class DrainRequested:
    """The worker, or the workers of the node, that `target` names shall leave in order within `lead_s`
    seconds. by: who asks for it.
    """

    target: str
    lead_s: float
    by: str
    answer: Answer


Signal = (
    Arrived
    | Cut
    | Silent
    | Heard
    | Unavailable
    | Ready
    | StartFailed
    | Lost
    | NodeDraining
    | Degraded
    | Ended
    | Fetched
    | Described
    | StepsFetched
    | SaveEnded
    | StopRequested
    | LeaseLost
    | Resize
    | DrainRequested
)
Post = Callable[[Signal], None]


class Signals:
    """The queue. `post` may be called from any thread and from a signal handler."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Signal] = queue.SimpleQueue()

    def post(self, signal: Signal) -> None:
        self._queue.put(signal)

    def next(self, timeout_s: float) -> Signal | None:
        try:
            return self._queue.get(timeout=max(timeout_s, 0.0)) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
