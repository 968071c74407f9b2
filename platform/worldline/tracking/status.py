"""What a run is doing now: `status.json`, replaced as a whole, read by anybody at any time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from worldline.process import Liveness, ProcessId
from worldline.tracking import jsonl

STATUS = "status.json"
INTERVAL_S = 0.2
HEARTBEAT_S = 5.0
SILENT_S = 60.0
DRAINING = "draining"
"""The phase of a worker that is about to leave, whatever it does until then."""


class RunState(StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    RECOVERING = "RECOVERING"
    DRAINING = "DRAINING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def over(self) -> bool:
        return self in (RunState.FINISHED, RunState.FAILED, RunState.STOPPED)


@dataclass(frozen=True)
class WorkerStatus:
    """One member of the world."""

    rank: int
    replica: int
    pid: int
    node: str
    ip: str
    step: int
    phase: str


@dataclass(frozen=True)
class Status:
    """What `worldline status --json` prints.

    step: completed steps; steps: how many the run will take, None where only epochs are known.
    world: replicas that train now. standbys: how many stand ready. loss and rows_per_s: of the newest step.
    goodput: the share of the wall-clock time since the attempt began that was spent in steps that count.
    incidents: what went wrong so far. updated: Unix time of this writing.
    """

    run: str
    state: RunState
    reason: str
    step: int
    steps: int | None
    epoch: int
    attempt: int
    generation: int
    world: int
    min: int
    max: int
    workers: tuple[WorkerStatus, ...]
    standbys: int
    loss: float | None
    rows_per_s: float | None
    goodput: float | None
    incidents: int
    mlflow_run_id: str | None
    storage: str
    updated: float = 0.0

    @property
    def leaving(self) -> int:
        return sum(worker.phase == DRAINING for worker in self.workers)


class StatusWriter:
    """Keeps `status.json` fresh without costing the controller more than an assignment.

    Protocol: `write` as often as wanted, from one thread; a thread of its own writes the newest at most every
    `INTERVAL_S`, and the same again every `HEARTBEAT_S`. `now=True` writes before it returns, for a change of
    state. `close` writes what is left. The file also names the driver's process, for `read_status`.
    A plain rename: readers always see a whole file, a crash of the machine may leave the one before.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATUS
        self._driver = asdict(ProcessId.current())
        self._newest: Status | None = None
        self._written: Status | None = None
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._writing = threading.Lock()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="status-writer", daemon=True)
        self._thread.start()

    def write(self, status: Status, now: bool = False) -> None:
        self._newest = status
        if now:
            self._flush()
        else:
            self._dirty.set()

    def close(self) -> None:
        self._closing.set()
        self._dirty.set()
        self._thread.join(timeout=5)
        self._flush()

    def abandon(self) -> None:
        """Close, and write nothing any more: the file is another driver's now."""
        with self._writing:
            self._newest = None
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            beat = not self._dirty.wait(HEARTBEAT_S)
            self._dirty.clear()
            self._flush(beat)

    def _flush(self, again: bool = False) -> None:
        with self._writing:
            status = self._newest
            if status is None or (status is self._written and not again):
                return
            # Not by asdict, which copies all there is, of thousands of workers, too.
            workers = [vars(worker) for worker in status.workers]
            fields = vars(status) | {"workers": workers, "updated": time.time(), "driver": self._driver}
            temporary = self._path.with_name(f".{STATUS}.{os.getpid()}")
            with contextlib.suppress(OSError):  # the disk is full: the run must not end for its status
                temporary.write_text(jsonl.encode(fields) + "\n")
                os.replace(temporary, self._path)
                self._written = status


def read_status(run_dir: Path, now: float | None = None) -> Status | None:
    """The run's newest status; None where it never had one.

    Where the file says that the run goes on but its driver is gone, the state is STOPPED, with the reason. A
    driver on another machine cannot be looked at: of its silence the reason tells.
    """
    try:
        fields: dict[str, Any] = jsonl.decode((run_dir / STATUS).read_bytes())
    except FileNotFoundError:
        return None
    driver = ProcessId(**fields.pop("driver"))
    fields["state"] = RunState(fields["state"])
    fields["workers"] = tuple(WorkerStatus(**worker) for worker in fields["workers"])
    status = Status(**fields)
    if status.state.over:
        return status
    liveness = driver.liveness(ProcessId.current())
    if liveness is Liveness.GONE:
        reason = f"driver process {driver.pid} is gone; run the same command again to resume"
        return replace(status, state=RunState.STOPPED, reason=reason, workers=(), world=0, standbys=0)
    silent_s = (time.time() if now is None else now) - status.updated
    if liveness is Liveness.UNKNOWN and silent_s > SILENT_S:
        silence = f"no word from the driver on {driver.host} for {silent_s:.0f} s"
        return replace(status, reason=f"{status.reason}; {silence}" if status.reason else silence)
    return status
