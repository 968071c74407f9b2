"""Puts one attempt of a run together, drives it, and takes it apart again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from worldline.control.budget import Budget
from worldline.control.cluster import Cluster, connect, node_address
from worldline.control.controller import Conclusion, Controller, Parts
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.lease import Lease
from worldline.control.line import Line
from worldline.control.planner import Limits
from worldline.control.restore import RestorePoint, restore_point
from worldline.control.runs import keep_manifest, open_run
from worldline.control.saves import Saves
from worldline.control.signals import LeaseLost, Signals, StopRequested
from worldline.data.feeder import start_feeder
from worldline.data.manifest import DataError, Manifest
from worldline.data.plan import Plan
from worldline.data.scan import scan
from worldline.data.transform import load_transform, transform_digest
from worldline.events import EventKind
from worldline.job.faults import JobError
from worldline.job.fingerprint import differences
from worldline.job.load import extend_path, job_digest, load_task
from worldline.job.spec import DatasetSpec, Job
from worldline.storage import Storage, open_storage
from worldline.tracking.console import Console
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, EvaluationLog, EventLog, StepLog
from worldline.tracking.mlflow import MlflowDelivery, embedded_uri
from worldline.tracking.status import RunState, Status, StatusWriter
from worldline.worker.orders import Hello, Setup
from worldline.worker.plans import training_plan, validation_plan

TRACKER_S = 60.0
STOPPED, INTERRUPTED = 75, 130


@dataclass(frozen=True)
class Result:
    """How an attempt ended. step: completed steps; folder: where the run lies."""

    state: RunState
    reason: str
    exit_code: int
    step: int
    folder: Path


@dataclass(frozen=True)
class Data:
    """The data sets as the controller knows them."""

    manifest: Manifest
    transform_digest: str
    validation_manifest: Manifest | None
    validation_transform_digest: str
    plan: Plan


def launch(job: Job, storage_url: str, search: Sequence[Path], console: Console) -> Result:
    """Run `job` until its line is finished or the attempt ends otherwise; continues the run of its name.

    Raises JobError (nothing was started), LeaseHeld (another driver has the run), StorageError,
    NoUsableCheckpoint.
    """
    extend_path(search)
    load_task(job.task, search)
    storage = open_storage(storage_url).child(job.name)
    data = survey(job)
    last_step = job.steps or (job.epochs or 0) * data.plan.steps_per_epoch
    folder = Path(storage.url)
    lease = Lease.acquire(storage, notify=lambda text: None)
    try:
        open_run(storage, job)
        keep_manifest(storage, "data/manifest.json", data.manifest, "data.train")
        if data.validation_manifest is not None:
            keep_manifest(storage, "data/validation.json", data.validation_manifest, "data.validation")
        storage.clear_stale()
        attempt = _Attempt(job, storage, folder, search, data, last_step, lease, console)
        with contextlib.closing(attempt):
            return attempt.run()
    finally:
        lease.release()


def survey(job: Job) -> Data:
    """Look at the data sets and make the plan. Raises JobError at the setting to change."""
    try:
        manifest = scan(job.data.train.path, job.data.train.columns)
        digest = _transform_digest(job.data.train)
        plan = training_plan(job, manifest, digest)
    except DataError as error:
        raise JobError([f"data.train: {error}"]) from error
    validation, validation_digest = None, ""
    if job.data.validation is not None:
        try:
            validation = scan(job.data.validation.path, job.data.validation.columns)
            validation_digest = _transform_digest(job.data.validation)
            validation_plan(job, validation, validation_digest)
        except DataError as error:
            raise JobError([f"data.validation: {error}"]) from error
    return Data(manifest, digest, validation, validation_digest, plan)


def _transform_digest(dataset: DatasetSpec) -> str:
    return transform_digest(load_transform(dataset.transform)) if dataset.transform else ""


class _Attempt:
    """One driver's life: logs, Ray, workers, controller, tracker. `close` leaves nothing behind."""

    def __init__(
        self,
        job: Job,
        storage: Storage,
        folder: Path,
        search: Sequence[Path],
        data: Data,
        last_step: int,
        lease: Lease,
        console: Console,
    ) -> None:
        self._job = job
        self._storage = storage
        self._folder = folder
        self._search = search
        self._data = data
        self._last_step = last_step
        self._lease = lease
        self._signals = Signals()
        self._steps = StepLog(folder / STEPS)
        self._evaluations = EvaluationLog(folder / EVALUATIONS)
        self._events = EventLog(folder / EVENTS)
        self._journal = Journal(self._first_status(), self._events, StatusWriter(folder), console)
        self._reference: dict[str, str] | None = None
        self._first_point: RestorePoint | None = None
        self._saves: Saves | None = None

    def run(self) -> Result:
        """Drive the attempt; the result is on disk, in the tracker and on the console when this returns."""
        lease = self._lease
        lease.start(lambda reason: self._signals.post(LeaseLost(reason)))
        self._journal.event(EventKind.ATTEMPT_STARTED, f"attempt {lease.attempt}")
        point = self._find_point()
        self._first_point = point
        self._steps.truncate(point.position.step)
        self._evaluations.truncate(point.position.step)
        self._journal.rewound(point.position.step)
        if point.position.step >= self._last_step:
            return self._end(Conclusion(RunState.FINISHED, "all steps were completed before", 0), None)
        tracker = self._start_tracker()
        try:
            conclusion = self._drive(point)
        except BaseException:
            if tracker is not None:
                tracker.kill()
            self._journal.close(RunState.FAILED, "the driver failed", "failed: the driver itself raised")
            raise
        return self._end(conclusion, tracker)

    def close(self) -> None:
        import ray

        if self._saves is not None:
            self._saves.close(timeout_s=10)
        for log in (self._steps, self._evaluations, self._events):
            log.close()
        if ray.is_initialized():
            ray.shutdown()

    def _drive(self, point: RestorePoint) -> Conclusion:
        job = self._job
        uses_ray_data = job.data.pipeline == "ray" or (
            job.data.pipeline == "auto" and job.data.train.transform is not None
        )
        workers = job.world.max + job.world.standby
        connect(
            workers * job.world.cpus_per_worker + (job.data.cpus if uses_ray_data else 0),
            lambda text: self._journal.event(EventKind.DEGRADED, text),
        )
        feeder = self._start_feeder(point) if uses_ray_data else None
        store = _rendezvous_store()
        cluster = Cluster(
            self._setup(feeder, store.port),
            job.world.cpus_per_worker,
            job.world.gpus_per_worker,
            self._signals.post,
        )
        line = Line(self._steps)
        self._saves = saves = self._make_saves(point)
        controller = Controller(
            Parts(
                cluster=cluster,
                signals=self._signals,
                line=line,
                saves=saves,
                intake=Intake(cluster, line, saves, self._evaluations, self._journal),
                journal=self._journal,
                limits=Limits(
                    min=job.world.min,
                    max=job.world.max,
                    standby=job.world.standby,
                    num_shards=job.batch.logical_shards,
                    start_s=job.failure.start_timeout_s,
                ),
                restore=self._restore,
                refuse=self._refuse,
                budget=Budget(job.failure.task_errors, job.failure.no_progress),
            )
        )
        with _stop_on_signals(self._signals.post):
            return controller.run()

    def _setup(self, feeder: Any, port: int) -> Setup:
        validation = self._data.validation_manifest
        return Setup(
            job=self._job.model_dump(mode="json", by_alias=True),
            search=tuple(map(str, self._search)),
            storage=self._storage.url,
            manifest=self._data.manifest.to_json(),
            validation_manifest=validation.to_json() if validation else None,
            transform_digest=self._data.transform_digest,
            validation_transform_digest=self._data.validation_transform_digest,
            feeder=feeder,
            store_host=node_address(),
            store_port=port,
            attempt=self._lease.attempt,
            last_step=self._last_step,
        )

    def _start_feeder(self, point: RestorePoint) -> Any:
        return start_feeder(
            self._data.plan,
            self._job.data.train.columns,
            first_step=point.position.step + 1,
            last_step=self._last_step,
            cpus=self._job.data.cpus,
            import_paths=[str(folder) for folder in self._search],
        )

    def _make_saves(self, point: RestorePoint) -> Saves:
        saves = Saves(
            self._storage,
            keep=self._job.checkpoint.keep,
            job_digest=job_digest(self._job),
            plan_fingerprint=self._data.plan.fingerprint,
            attempt=self._lease.attempt,
            post=self._signals.post,
            before_commit=self._steps.sync,
            may_write=self._lease.renew,
            warn=lambda text: None,
        )
        saves.committed = point.position.step if point.key else -1
        return saves

    def _find_point(self) -> RestorePoint:
        return restore_point(
            self._storage, lambda text: self._journal.event(EventKind.CHECKPOINT_PASSED_OVER, text)
        )

    def _restore(self) -> RestorePoint:
        """The point found at the start; later, after all workers died, what is newest then."""
        point, self._first_point = self._first_point, None
        point = point or self._find_point()
        if point.manifest is not None and point.manifest.plan_fingerprint != self._data.plan.fingerprint:
            raise JobError([f"data: {point.key} belongs to another sample plan than the job's"])
        return point

    def _refuse(self, hello: Hello) -> str:
        """Numbers must not change with who computes them: compare with the checkpoint or the first worker."""
        if self._reference is None:
            manifest = self._first_point.manifest if self._first_point else None
            stored = manifest.numeric_fingerprint if manifest else None
            self._reference = dict(stored or hello.numeric_fingerprint)
            if self._saves is not None:
                self._saves.numeric_fingerprint = self._reference
        found = differences(hello.numeric_fingerprint, self._reference)
        if not found or self._job.mode != "bitwise":
            return ""
        return (
            f"node {hello.ip} would compute other bits than the run ({'; '.join(found)}); "
            "use nodes of one kind, or mode: same_batches"
        )

    def _start_tracker(self) -> MlflowDelivery | None:
        job = self._job
        if not job.tracking.enabled:
            return None
        root = self._folder.parent
        return MlflowDelivery.start(
            self._folder,
            job.tracking.uri or embedded_uri(root),
            job.tracking.experiment,
            job.name,
            params={
                "task": job.task.class_,
                "logical_shards": job.batch.logical_shards,
                "rows_per_shard": job.batch.rows_per_shard,
                "accumulate": job.batch.accumulate,
                "global_batch_rows": job.batch.global_rows,
                "seed": job.seed,
                "precision": job.precision,
                "mode": job.mode,
                "job_digest": job_digest(job),
            },
            tags={
                "attempt": self._lease.attempt,
                "world.min": job.world.min,
                "world.max": job.world.max,
                "steps": self._last_step,
            },
        )

    def _end(self, conclusion: Conclusion, tracker: MlflowDelivery | None) -> Result:
        kind = {
            RunState.FINISHED: EventKind.FINISHED,
            RunState.FAILED: EventKind.FAILED,
        }.get(conclusion.state, EventKind.STOPPED)
        if self._saves is not None:
            self._saves.close(timeout_s=10)
        self._journal.event(kind, conclusion.reason, world=0)
        shortfall = None
        if tracker is not None:
            status = {RunState.FINISHED: "FINISHED", RunState.FAILED: "FAILED"}.get(
                conclusion.state, "KILLED"
            )
            self._steps.sync()
            shortfall = tracker.finish(status, TRACKER_S)  # type: ignore[arg-type]
            self._journal.tracker_run(tracker.run_id)
        status_now = self._journal.status
        summary = (
            f"{conclusion.state.lower()} at step {status_now.step} of {self._last_step}"
            + (f": {conclusion.reason}" if conclusion.reason else "")
            + f"; {status_now.incidents} incidents; {self._folder}"
            + (f"\n{shortfall}" if shortfall else "")
        )
        self._journal.close(conclusion.state, conclusion.reason, summary)
        return Result(
            conclusion.state, conclusion.reason, conclusion.exit_code, status_now.step, self._folder
        )

    def _first_status(self) -> Status:
        return Status(
            run=self._job.name,
            state=RunState.STARTING,
            reason="",
            step=0,
            steps=self._last_step,
            epoch=0,
            attempt=self._lease.attempt,
            generation=0,
            world=0,
            min=self._job.world.min,
            max=self._job.world.max,
            workers=(),
            standbys=0,
            loss=None,
            rows_per_s=None,
            goodput=None,
            incidents=0,
            mlflow_run_id=None,
            storage=self._storage.url,
        )


def _rendezvous_store() -> Any:
    """The TCP store in this process where the members of each generation meet."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


@contextlib.contextmanager
def _stop_on_signals(post: Callable[[StopRequested], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run in order; a second Ctrl-C interrupts that.

    Installed after Ray's own, which it replaces; only the main thread may.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        post(StopRequested("SIGTERM", STOPPED))

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        post(StopRequested("interrupted", INTERRUPTED))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
