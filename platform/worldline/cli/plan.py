"""`plan`: what a job amounts to, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from worldline.cli.options import job_argument, set_option
from worldline.job.load import JobError, extend_path, load_job, load_task, search_path

if TYPE_CHECKING:
    from worldline.data.plan import Plan
    from worldline.job.spec import Job


class Outlook(NamedTuple):
    """One world size. shards, sent: of the replica that computes, that sends (bytes a step) the most."""

    world: int
    shards: int
    efficiency: float
    sent: int


@click.command()
@job_argument
@set_option
def plan(job_file: Path, overrides: Sequence[str]) -> None:
    """Steps, and for each world size the efficiency and the bytes sent a step."""
    job = load_job(job_file, overrides)
    search = search_path(job_file)
    sizes = gradient_sizes(job, search)
    for line in describe(job, train_plan(job, search), sizes):
        click.echo(line, err=True)


COMMANDS: list[click.Command] = [plan]


def train_plan(job: Job, search: Sequence[Path]) -> Plan:
    """The sample plan the run will have. Raises JobError where the data does not fit the job."""
    from worldline.data.manifest import DataError
    from worldline.data.plan import Plan
    from worldline.data.scan import scan
    from worldline.data.transform import load_transform

    data = job.data
    extend_path(search)
    try:
        if data.train.transform is not None:
            load_transform(data.train.transform)
        return Plan(
            scan(data.train.path, data.train.columns),
            seed=job.seed,
            num_shards=job.batch.logical_shards,
            rows_per_shard=job.batch.rows_per_shard * job.batch.accumulate,
            window_rows=data.window_rows,
            shuffle=data.shuffle,
            transform=data.train.transform,
        )
    except DataError as error:
        raise JobError([f"data.train: {error}"]) from error


def gradient_sizes(job: Job, search: Sequence[Path]) -> list[int]:
    """Bytes of each trainable parameter's gradient."""
    from worldline.worker.builders import TaskError, build_model

    try:
        model = build_model(load_task(job.task, search), search)
    except TaskError as error:
        raise click.ClickException(str(error)) from error
    return [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]


def describe(job: Job, samples: Plan, sizes: Sequence[int]) -> Iterator[str]:
    batch, manifest = job.batch, samples.manifest
    per_epoch = samples.steps_per_epoch
    steps = job.steps if job.steps is not None else per_epoch * (job.epochs or 1)
    short = samples.step_rows(per_epoch)
    times = f" x {batch.accumulate}" if batch.accumulate > 1 else ""
    yield f"{job.name}: {steps:,} steps, {steps / per_epoch:.2f} epochs of {per_epoch:,} steps"
    files = len(manifest.files)
    yield f"data    {manifest.num_rows:,} rows in {files:,} file{'s' if files > 1 else ''}"
    yield (
        f"batch   {batch.global_rows:,} rows a step: {batch.logical_shards} logical shards "
        f"of {batch.rows_per_shard}{times}, whatever the world"
    )
    yield (
        f"        {sum(short):,} rows in the last step of an epoch, "
        f"{min(short)} to {max(short)} a shard{_norm_warning(short)}"
    )
    yield f"model   {len(sizes):,} trainable tensors, {_size(sum(sizes))} of gradients"
    yield ""
    yield f"{'world':>5}  {'shards a replica':>16}  {'efficiency':>10}  {'sent a step':>11}"
    for o in outlook(job, sum(sizes)):
        yield f"{o.world:>5}  {o.shards:>16}  {o.efficiency:>10.0%}  {_size(o.sent):>11}"


def outlook(job: Job, gradient_bytes: int) -> Iterator[Outlook]:
    """Every world size the job allows. A step lasts as long as its largest replica: the others wait."""
    from worldline.world import assign

    num_shards = job.batch.logical_shards
    for world in range(job.world.min, job.world.max + 1):
        ranges = assign(num_shards, world)
        most = max(len(r.shards) for r in ranges)
        sent = _bytes_sent(job.mode, gradient_bytes, world, most_partials(num_shards, world))
        yield Outlook(world, most, num_shards / (world * most), sent)


def most_partials(num_shards: int, world: int) -> int:
    """Partial sums of the replica that keeps most: its range's maximal subtrees of the canonical tree."""
    from worldline.collective.tree import subtrees
    from worldline.world import assign

    return max(len(subtrees(r)) for r in assign(num_shards, world))


def _bytes_sent(mode: str, gradient_bytes: int, world: int, partials: int) -> int:
    """To the other replicas: each partial's chunks, then the sum of the own chunk; or a ring all-reduce."""
    copies = partials + 1 if mode == "bitwise" else 2
    return copies * gradient_bytes * (world - 1) // world


def _norm_warning(short: Sequence[int]) -> str:
    return " (BatchNorm cannot train on a single row)" if 1 in short else ""


def _size(num_bytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"
