"""`doctor`: would this machine, and this job on it, run? Each finding says what to do about it."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.request import urlopen

import click

from worldline.cli.options import set_option, storage_option
from worldline.cli.plan import train_plan
from worldline.job.load import JobError, load_job, load_task, search_path
from worldline.usercode import raised

if TYPE_CHECKING:
    import torch

    from worldline.data.plan import Plan
    from worldline.job.spec import Job, TrackingSpec
    from worldline.task import Batch, Task

GIB = 2**30
PACKAGES = ("torch", "ray", "mlflow", "pyarrow")
TIMEOUT_S = 5


class Finding(NamedTuple):
    """One line. advice: what to do, where the level is not ok."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    found: str
    advice: str = ""


@click.command()
@click.argument("job_file", metavar="[JOB]", required=False, type=click.Path(path_type=Path))
@set_option
@storage_option
def doctor(job_file: Path | None, overrides: Sequence[str], storage: str | None) -> int:
    """Check this machine, and a job on it; exit 1 where something would not work."""
    levels = []
    for finding in examine(job_file, overrides, storage):
        levels.append(finding.level)
        advice = f" -> {finding.advice}" if finding.advice else ""
        click.echo(f"{finding.level:<4}  {finding.subject:<10}  {finding.found}{advice}", err=True)
    return 1 if "fail" in levels else 0


COMMANDS: list[click.Command] = [doctor]


def examine(job_file: Path | None, overrides: Sequence[str], storage: str | None) -> Iterator[Finding]:
    job: Job | None = None
    faults: Sequence[str] = ()
    if job_file is not None:
        try:
            job = load_job(job_file, overrides)
        except JobError as error:
            faults = error.faults
    yield from packages()
    yield from shared_memory()
    yield from cores(job)
    url = storage or (job.checkpoint.storage if job else None) or "runs"
    yield from guarded("storage", lambda: storage_works(url))
    yield from (Finding("fail", "job", fault) for fault in faults)
    if job is not None and job_file is not None:
        yield Finding("ok", "job", f"{job.name} is valid")
        yield from tracking(job.tracking)
        search = search_path(job_file)
        yield from guarded("first step", lambda: first_step(job, search), search)


def guarded(
    subject: str, check: Callable[[], Iterator[Finding]], search: Sequence[Path] = ()
) -> Iterator[Finding]:
    """What a check finds; what it raises is a finding too, with its place in the job's code."""
    try:
        yield from check()
    except JobError as error:
        yield from (Finding("fail", subject, fault) for fault in error.faults)
    except Exception as error:
        yield Finding("fail", subject, raised(error, search))


def packages() -> Iterator[Finding]:
    yield Finding("ok", "python", ".".join(map(str, sys.version_info[:3])))
    for name in PACKAGES:
        try:
            yield Finding("ok", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("fail", name, "not installed", "pip install worldline")


def shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    """Ray keeps its objects there, or on disk where it is small."""
    if not os.path.isdir(path):
        return
    size = shutil.disk_usage(path).total
    if size >= 2 * GIB:
        yield Finding("ok", path, f"{size / GIB:.1f} GiB")
    else:
        advice = "Ray will use the disk, which is slow; in a container give --shm-size=4g"
        yield Finding("warn", path, f"{size / GIB:.2f} GiB", advice)


def cores(job: Job | None) -> Iterator[Finding]:
    """The embedded Ray counts logical CPUs, so too few cores only cost time; a missing GPU does not come."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if job is None:
        yield Finding("ok", "cores", str(available))
        return
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("ok", "cores", f"not counted: the run goes to the cluster at {address}")
        return
    needed = job.world.max * job.world.cpus_per_worker
    found = f"{available} for world.max={job.world.max} of {job.world.cpus_per_worker:g}"
    if needed <= available:
        yield Finding("ok", "cores", found)
    else:
        yield Finding("warn", "cores", found, "workers will share cores: it works, but slower")
    if gpus := job.world.max * job.world.gpus_per_worker:
        import torch

        there = torch.cuda.device_count()
        advice = "" if there >= gpus else "lower world.max or set RAY_ADDRESS to a cluster that has them"
        yield Finding("fail" if advice else "ok", "gpus", f"{there} of {gpus:g} needed", advice)


def storage_works(url: str) -> Iterator[Finding]:
    """Writes, reads back and deletes one small object."""
    from worldline.storage import StorageError, open_storage

    key = f"doctor-{os.getpid()}"
    try:
        storage = open_storage(url)
        storage.put(key, b"worldline")
        same = storage.get(key) == b"worldline"
        storage.delete(key)
    except StorageError as error:
        yield Finding("fail", "storage", str(error), "choose another with --storage")
        return
    if not same:
        yield Finding("fail", "storage", f"{url} gave back other bytes", "choose another with --storage")
        return
    yield Finding("ok", "storage", f"{storage.url} can be written")
    if (folder := storage.local_path(key)) is not None:
        usage = shutil.disk_usage(folder.parent)
        free = f"{usage.free / GIB:.1f} GiB free"
        if usage.free < GIB:
            yield Finding("fail", "disk", free, "make room: a checkpoint may not fit")
        elif usage.free < 10 * GIB or usage.free < 0.05 * usage.total:
            yield Finding("warn", "disk", free, "make room: Ray stops storing objects on a disk 95 % full")
        else:
            yield Finding("ok", "disk", free)


def tracking(spec: TrackingSpec) -> Iterator[Finding]:
    """A server that is away never stops a run, so this only warns."""
    if not spec.enabled:
        yield Finding("ok", "tracking", "MLflow is off")
    elif spec.uri is None:
        yield Finding("ok", "tracking", "SQLite beside the runs")
    elif not spec.uri.startswith(("http://", "https://")):
        yield Finding("ok", "tracking", f"{spec.uri} (not tried)")
    else:
        try:
            with urlopen(f"{spec.uri.rstrip('/')}/health", timeout=TIMEOUT_S):
                yield Finding("ok", "tracking", f"{spec.uri} answers")
        except OSError as error:
            advice = "the run will train and keep its points until the server answers; see tracking.uri"
            yield Finding("warn", "tracking", f"{spec.uri}: {error}", advice)


def first_step(job: Job, search: Sequence[Path]) -> Iterator[Finding]:
    """Builds the task as a worker does, takes one micro-batch forward and backward, and updates."""
    import torch

    from worldline.data.loader import Loader
    from worldline.data.reader import LocalSource, WindowReader, load_transform
    from worldline.job.fingerprint import make_deterministic
    from worldline.worker.builders import TaskError, build_training

    make_deterministic(job.world.threads)
    torch.manual_seed(job.seed)
    task = load_task(job.task, search)
    try:
        model, optimizer, scheduler = build_training(task, torch.device("cpu"), search)
    except TaskError as error:
        yield Finding("fail", "task", str(error))
        return
    parameters = sum(p.numel() for p in model.parameters())
    yield Finding("ok", "task", f"{job.task.class_} builds: {parameters:,} parameters")

    samples: Plan = train_plan(job, search)
    spec = job.data.train
    transform = load_transform(spec.transform) if spec.transform else None
    source = LocalSource(WindowReader(samples.manifest, spec.columns, transform), samples)
    loader = Loader(samples, source, job.batch.rows_per_shard, prefetch=0, timeout_s=job.failure.timeout_s)
    try:
        batch = loader.batches(1, 0)[0]
    finally:
        loader.close()
    columns = ", ".join(f"{name} {_shape(values)}" for name, values in batch.columns.items())
    yield Finding("ok", "data", f"{samples.manifest.num_rows:,} rows; a batch has {columns}")
    loss = loss_finding(task, model, batch.columns)
    yield loss
    if loss.level == "ok":
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def loss_finding(task: Task, model: torch.nn.Module, columns: Batch) -> Finding:
    import torch

    from worldline.task import Loss

    result = task.loss(model.train(), columns)
    loss = result.sum / result.weight if isinstance(result, Loss) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        advice = "return a scalar tensor or a worldline.Loss"
        return Finding("fail", "loss", f"loss() gave {type(loss).__name__} {_shape(loss)}".rstrip(), advice)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return Finding("fail", "loss", "no parameter has a gradient", "loss() must use the model")
    if not math.isfinite(loss.item()) or not all(bool(g.isfinite().all()) for g in gradients):
        advice = "look at the first batch, the initialisation and the learning rate"
        return Finding("fail", "loss", f"{loss.item():g}, or its gradient, is not finite", advice)
    return Finding("ok", "loss", f"{loss.item():.4g} on the first batch; its gradient is finite")


def _shape(values: object) -> str:
    shape = getattr(values, "shape", None)
    return "" if shape is None else str(list(shape))
