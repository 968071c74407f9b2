"""Everything the controller says to the outside: events, status, console. It never answers back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from worldline.control.member import Member, MemberState
from worldline.control.membership import Membership
from worldline.events import Event, EventKind, StepRecord
from worldline.tracking.console import Console
from worldline.tracking.incidents import INCIDENT_KINDS
from worldline.tracking.log import EventLog
from worldline.tracking.status import DRAINING, RunState, Status, StatusWriter, WorkerStatus
from worldline.world import Position


@dataclass
class Progress:
    """How far a worker said it is."""

    position: Position | None = None
    phase: str = "idle"


class Journal:
    """Keeps the run's status and passes it on; `event` is durable, `steps` and `refresh` are cheap.

    After `mute` only the console hears: another driver has the run, and its files are no longer ours.
    """

    def __init__(self, status: Status, events: EventLog, writer: StatusWriter, console: Console) -> None:
        self._status = status
        self._events = events
        self._writer = writer
        self._console = console
        self._began = time.monotonic()
        self._productive_s = 0.0
        self._lr: float | None = None
        self._muted = False

    def begin(self) -> None:
        """From now on `status.json` is this attempt's."""
        self._write(now=True)

    def mute(self) -> None:
        self._muted = True
        self._writer.abandon()

    @property
    def status(self) -> Status:
        return self._status

    def event(
        self,
        kind: EventKind,
        reason: str = "",
        *,
        workers: Sequence[str] = (),
        world: int | None = None,
        seconds: float | None = None,
        step: int | None = None,
    ) -> None:
        """world: the size after the event, where it changes. step: the completed one, where that is better
        known than from the newest line of the step log.
        """
        before = self._status.world
        after = before if world is None else world
        status = self._status
        event = Event(
            time=time.time(),
            kind=kind,
            generation=status.generation,
            step=status.step if step is None else step,
            world_before=before,
            world_after=after,
            workers=tuple(workers),
            reason=reason,
            seconds=seconds,
        )
        if not self._muted:
            self._events.append([event])
        self._console.event(event)
        self._status = replace(status, world=after, incidents=status.incidents + (kind in INCIDENT_KINDS))

    def state(self, state: RunState, reason: str = "") -> None:
        if (state, reason) != (self._status.state, self._status.reason):
            self._status = replace(self._status, state=state, reason=reason)
            self._write(now=True)
            self._console.update(self._status, self._lr)

    def generation(self, generation: int) -> None:
        self._status = replace(self._status, generation=generation)

    def resized(self, most: int) -> None:
        self._status = replace(self._status, max=most)

    def rewound(self, step: int) -> None:
        self._status = replace(self._status, step=step)

    def tracker_run(self, run_id: str | None) -> None:
        self._status = replace(self._status, mlflow_run_id=run_id)

    def steps(self, records: Sequence[StepRecord]) -> None:
        if not records:
            return
        newest = records[-1]
        self._productive_s += sum(record.step_s for record in records)
        self._lr = newest.lr
        seconds = sum(record.step_s for record in records)
        self._status = replace(
            self._status,
            step=newest.step,
            epoch=newest.epoch,
            loss=newest.loss,
            rows_per_s=sum(record.rows for record in records) / seconds if seconds else None,
            goodput=min(1.0, self._productive_s / max(time.monotonic() - self._began, 1e-9)),
        )

    def refresh(self, membership: Membership, progress: dict[str, Progress], *, now: bool = False) -> None:
        """Bring the list of workers up to date and pass the status on."""
        workers = tuple(
            WorkerStatus(
                rank=m.rank,
                replica=m.rank,
                pid=m.hello.pid,
                node=m.hello.node,
                ip=m.hello.ip,
                step=_step(progress.get(m.id)),
                phase=_phase(m, progress.get(m.id)),
            )
            for m in membership.current
            if m.hello is not None
        )
        standbys = len(membership.in_state(MemberState.STANDBY))
        self._status = replace(self._status, workers=workers, standbys=standbys)
        self._write(now=now)
        self._console.update(self._status, self._lr)

    def close(self, state: RunState, reason: str, summary: str) -> None:
        self._status = replace(self._status, state=state, reason=reason, workers=(), world=0, standbys=0)
        self._write(now=True)
        if not self._muted:
            self._writer.close()
        self._console.close(summary)

    def _write(self, *, now: bool) -> None:
        if not self._muted:
            self._writer.write(self._status, now=now)


def _phase(member: Member, progress: Progress | None) -> str:
    if member.drain is not None:
        return DRAINING
    return progress.phase if progress is not None else "form"


def _step(progress: Progress | None) -> int:
    return progress.position.step if progress is not None and progress.position is not None else 0
