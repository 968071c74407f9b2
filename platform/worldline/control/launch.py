"""One attempt of a run, from taking the lease to the last word."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from worldline.checkpoint.manifest import CheckpointError
from worldline.control import assemble
from worldline.control.budget import Budget
from worldline.control.chaos import Script
from worldline.control.cluster import Cluster, connect
from worldline.control.controller import Controller, Parts
from worldline.control.drains import ApiMoved, Drains
from worldline.control.ending import Conclusion
from worldline.control.inbox import Inbox
from worldline.control.injector import Injector
from worldline.control.intake import Intake
from worldline.control.interrupts import stop_on_signals
from worldline.control.journal import Journal
from worldline.control.lease import Lease
from worldline.control.line import Line
from worldline.control.reference import Reference
from worldline.control.rendezvous import Rendezvous
from worldline.control.restore import RestorePoint, restore_point
from worldline.control.runs import keep_manifest, open_run
from worldline.control.saves import Saves
from worldline.control.schedule import schedule
from worldline.control.signals import Degraded, LeaseLost, Signals, StopRequested
from worldline.control.survey import Data, survey
from worldline.events import Event, EventKind
from worldline.exits import FINISHED, TRY_AGAIN
from worldline.job.faults import JobError
from worldline.job.load import extend_path, job_digest, load_task
from worldline.job.spec import Job
from worldline.storage import Storage, StorageError, open_storage
from worldline.tracking.console import Console
from worldline.tracking.ending import GO_ON
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, EvaluationLog, EventLog, StepLog
from worldline.tracking.mlflow import FinalStatus, MlflowDelivery
from worldline.tracking.status import RunState, StatusWriter

TRACKER_S = 60.0
HURRY_S = 1.0
"""For the tracker after a SIGTERM: `ray job stop` gives the driver 3 s for everything, and what the tracker
did not get the next attempt sends."""
COMMIT_S = 10.0

_EVENTS = {RunState.FINISHED: EventKind.FINISHED, RunState.FAILED: EventKind.FAILED}
_TRACKED: dict[RunState, FinalStatus] = {RunState.FINISHED: "FINISHED", RunState.FAILED: "FAILED"}


@dataclass(frozen=True)
class Result:
    """How an attempt ended. step: completed steps; folder: where the run lies."""

    state: RunState
    reason: str
    exit_code: int
    step: int
    folder: Path


def launch(
    job: Job, storage_url: str, search: Sequence[Path], console: Console, chaos: Script | None = None
) -> Result:
    """Run `job` until its line is finished or the attempt ends otherwise; continues the run of its name.

    chaos: what shall go wrong on the way.

    Raises JobError (nothing was started), LeaseHeld (another driver has the run), StorageError,
    NoUsableCheckpoint.
    """
    extend_path(search)
    load_task(job.task, search)
    storage = open_storage(storage_url).child(job.name)
    data = survey(job)
    lease = Lease.acquire(storage, notify=lambda text: console.event(_waiting(text)))
    try:
        open_run(storage, job)
        keep_manifest(storage, "data/manifest.json", data.manifest, "data.train")
        if data.validation_manifest is not None:
            keep_manifest(storage, "data/validation.json", data.validation_manifest, "data.validation")
        storage.clear_stale()
        attempt = _Attempt(job, storage, search, data, lease, console, chaos)
    except BaseException:
        lease.release()
        raise
    # Until nothing is left to be done: a signal that comes after the end of the training changes nothing.
    with stop_on_signals(attempt.stop), contextlib.closing(attempt):
        return attempt.run()


def _waiting(reason: str) -> Event:
    return Event(time.time(), EventKind.WAITING, 0, 0, 0, 0, reason=reason)


class _Attempt:
    """One driver's life: logs, tracker, Ray, workers, controller. `close` leaves nothing behind and lets the
    run go.
    """

    def __init__(
        self,
        job: Job,
        storage: Storage,
        search: Sequence[Path],
        data: Data,
        lease: Lease,
        console: Console,
        chaos: Script | None,
    ) -> None:
        self._job = job
        self._storage = storage
        self._folder = folder = Path(storage.url)
        self._search = search
        self._data = data
        self._last_step = job.steps or (job.epochs or 0) * data.plan.steps_per_epoch
        self._lease = lease
        self._lease_lost = False
        self._stop_asked: StopRequested | None = None
        self._ray_is_ours = False
        self._chaos = chaos
        self._signals = Signals()
        self._steps = StepLog(folder / STEPS)
        self._evaluations = EvaluationLog(folder / EVALUATIONS)
        self._events = EventLog(folder / EVENTS)
        status = assemble.first_status(job, lease.attempt, self._last_step, storage.url)
        writer = StatusWriter(folder)
        self._inbox = Inbox(storage, lease.attempt, self._signals.post)
        self._journal = Journal(status, self._events, writer, console)
        self._saves: Saves | None = None
        self._tracker: MlflowDelivery | None = None

    def run(self) -> Result:
        """Drive the attempt; the result is on disk, in the tracker and on the console when this returns."""
        with contextlib.closing(self._inbox):
            with self._last_word():
                conclusion = self._train()
            self._inbox.end()
            return self._end(conclusion)

    def _train(self) -> Conclusion:
        self._lease.start(self._lose_lease)
        if not self._lease.renew():  # this process was stopped while it started
            self._lose_lease("another driver has taken the run")
            return Conclusion(RunState.STOPPED, "another driver has taken the run", TRY_AGAIN)
        self._steps.take_over()
        self._evaluations.take_over()
        self._journal.begin()
        self._journal.event(EventKind.ATTEMPT_STARTED, f"attempt {self._lease.attempt}")
        point = self._find_point()
        self._continue_logs(point)
        if point.position.step >= self._last_step:
            return Conclusion(RunState.FINISHED, "all steps were completed before", FINISHED)
        self._tracker = assemble.tracker(self._job, self._folder, self._lease.attempt, self._last_step)
        self._inbox.start()
        if self._stop_asked is not None:  # Ray need not even start
            return Conclusion(RunState.STOPPED, self._stop_asked.reason, self._stop_asked.exit_code)
        return self._drive(point)

    @contextlib.contextmanager
    def _last_word(self) -> Iterator[None]:
        """If what is done here raises, say so wherever somebody may look."""
        try:
            yield
        except BaseException as error:
            if self._tracker is not None:
                self._tracker.kill()
            state, what = RunState.FAILED, f"the driver itself failed: {type(error).__name__}: {error}"
            if isinstance(error, JobError | CheckpointError | StorageError):
                what = str(error)
            elif isinstance(error, KeyboardInterrupt):
                state, what = RunState.STOPPED, "interrupted before all was saved"
            go_on = GO_ON if state is RunState.STOPPED else ""
            self._journal.close(state, what, f"{state.lower()}: {what}{go_on}")
            raise

    def close(self) -> None:
        import ray

        try:
            if self._saves is not None:
                self._saves.close(COMMIT_S)
            for log in (self._steps, self._evaluations, self._events):
                log.close()
            if self._ray_is_ours and ray.is_initialized():
                ray.shutdown()
        finally:
            self._lease.release()

    def stop(self, request: StopRequested) -> None:
        self._stop_asked = request
        self._signals.post(request)

    def _patience_s(self, conclusion: Conclusion) -> float:
        """For the tracker. A stop that comes while it is waited for, SIGTERM or Ctrl-C, cuts that short."""
        stop = self._stop_asked
        if stop is None or (stop.exit_code != TRY_AGAIN and stop.exit_code == conclusion.exit_code):
            return TRACKER_S
        return HURRY_S

    def _lose_lease(self, reason: str) -> None:
        self._lease_lost = True
        self._signals.post(LeaseLost(reason))

    def _continue_logs(self, point: RestorePoint) -> None:
        missing = self._steps.truncate(point.position.step)
        self._evaluations.truncate(point.position.step)
        self._journal.rewound(point.position.step)
        if missing:
            self._journal.event(
                EventKind.DEGRADED,
                f"the step log lacks the last {missing} steps before {point.key}, which is whole",
            )

    def _drive(self, point: RestorePoint) -> Conclusion:
        import ray

        job = self._job
        self._ray_is_ours = not ray.is_initialized()
        connect(assemble.logical_cpus(job), lambda text: self._journal.event(EventKind.DEGRADED, text))
        first_step = point.position.step + 1
        rendezvous = Rendezvous()
        setup = assemble.worker_setup(
            job,
            self._data,
            self._search,
            storage_url=self._storage.url,
            feeder=assemble.feeder(job, self._data, self._search, first_step, self._last_step),
            store_port=rendezvous.port,
            attempt=self._lease.attempt,
            last_step=self._last_step,
        )
        cluster = Cluster(
            setup,
            job.world.cpus_per_worker,
            job.world.gpus_per_worker,
            beat_s=assemble.beat_s(job),
            silent_s=job.failure.silent_s,
            post=self._signals.post,
        )
        reference = Reference(
            point.manifest.numeric_fingerprint if point.manifest else None, strict=job.mode == "bitwise"
        )
        line = Line(self._steps)
        self._saves = saves = self._make_saves(point, reference)
        found = [point]  # of use once; later, after all workers died, what is newest then
        controller = Controller(
            Parts(
                cluster=cluster,
                signals=self._signals,
                line=line,
                saves=saves,
                intake=Intake(cluster, line, saves, self._evaluations, self._journal),
                journal=self._journal,
                limits=assemble.limits(job),
                restore=lambda: found.pop() if found else self._find_point(),
                refuse=reference.refuse,
                budget=Budget(
                    job.failure.task_errors, job.failure.no_progress, last_step=point.position.step
                ),
                forget_before=rendezvous.forget_before,
                injector=self._make_injector(cluster),
            )
        )
        with self._drains():
            return controller.run()

    def _drains(self) -> contextlib.AbstractContextManager[object]:
        try:
            return Drains(self._signals.post)
        except ApiMoved as error:
            self._journal.event(EventKind.DEGRADED, f"that a node shall end is not heard of: {error}")
            return contextlib.nullcontext()

    def _make_injector(self, cluster: Cluster) -> Injector | None:
        if self._chaos is None:
            return None
        world = self._job.world

        def note(text: str, workers: Sequence[str]) -> None:
            self._journal.event(EventKind.FAULT_INJECTED, text, workers=workers)

        return Injector(schedule(self._chaos, world.min, world.max), cluster.harm, self._signals.post, note)

    def _make_saves(self, point: RestorePoint, reference: Reference) -> Saves:
        saves = Saves(
            self._storage,
            every_steps=self._job.checkpoint.every_steps,
            keep=self._job.checkpoint.keep,
            job_digest=job_digest(self._job),
            plan_fingerprint=self._data.plan.fingerprint,
            numeric_fingerprint=reference.fingerprint,
            attempt=self._lease.attempt,
            post=self._signals.post,
            before_commit=self._steps.sync,
            may_write=self._lease.renew,
            warn=lambda text: self._signals.post(Degraded(text)),
        )
        saves.rewind(point.position.step, durable=point.key is not None)
        return saves

    def _find_point(self) -> RestorePoint:
        point = restore_point(
            self._storage, lambda text: self._journal.event(EventKind.CHECKPOINT_PASSED_OVER, text)
        )
        if point.manifest is not None and point.manifest.plan_fingerprint != self._data.plan.fingerprint:
            raise JobError([f"data: {point.key} belongs to another sample plan than the job's"])
        return point

    def _end(self, conclusion: Conclusion) -> Result:
        tracker = self._tracker
        if self._saves is not None:
            self._saves.close(COMMIT_S)
        if self._lease_lost:
            self._journal.mute()
        self._journal.event(_EVENTS.get(conclusion.state, EventKind.STOPPED), conclusion.reason, world=0)
        shortfall = None
        if tracker is not None and self._lease_lost:
            tracker.kill()  # the tracker's run, too, is the other driver's now
        elif tracker is not None:
            with contextlib.suppress(OSError):  # the disk is full, and the end has its reason already
                self._steps.sync()
            # The driver may be ended while it waits for the tracker: how the run ended is known before.
            self._journal.state(conclusion.state, conclusion.reason)
            status_there = _TRACKED.get(conclusion.state, "KILLED")
            shortfall = tracker.finish(status_there, lambda: self._patience_s(conclusion))
            self._journal.tracker_run(tracker.run_id)
        status = self._journal.status
        summary = (
            f"{conclusion.state.lower()} at step {status.step} of {self._last_step}"
            + (f": {conclusion.reason}" if conclusion.reason else "")
            + f"; {status.incidents} incidents; {self._folder}"
            + (GO_ON if conclusion.state is RunState.STOPPED and not self._lease_lost else "")
            + (f"\n{shortfall}" if shortfall else "")
        )
        self._journal.close(conclusion.state, conclusion.reason, summary)
        return Result(conclusion.state, conclusion.reason, conclusion.exit_code, status.step, self._folder)
