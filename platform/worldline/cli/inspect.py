"""Commands that look at runs and change nothing: status, watch, verify, audit, report.

They read the run's folder only. What is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from worldline.cli.options import DEFAULT_STORAGE, json_option, storage_option
from worldline.exits import TRY_AGAIN, WRONG_USAGE
from worldline.storage import StorageError, open_storage
from worldline.tracking import jsonl
from worldline.tracking.log import EVENTS, STEPS, event_of, read_steps
from worldline.tracking.status import STATUS, Status, read_status

if TYPE_CHECKING:
    from worldline.data.audit import Audit

POLL_S = 0.25
NODE = 8
"""Characters of a node's id that people are shown; the commands that take a node take these."""
RUN, MANIFEST = "run.json", "data/manifest.json"
_RUN_FILES = (STATUS, STEPS, RUN)


class WrongUsage(click.ClickException):
    exit_code = WRONG_USAGE


class TryAgain(click.ClickException):
    exit_code = TRY_AGAIN


def find_run(run: str, storage: str | None) -> Path:
    """The folder of a run, given by its name under the storage or by its path.

    Raises WrongUsage, with the names that exist, where there is none.
    """
    try:
        root = Path(open_storage(storage or DEFAULT_STORAGE).url)
    except StorageError as error:
        raise WrongUsage(str(error)) from error
    for folder in (root / run, Path(run)):
        if _is_run(folder):
            return folder
    names = sorted(folder.name for folder in root.iterdir() if _is_run(folder)) if root.is_dir() else []
    there = f"it holds {', '.join(names)}" if names else "it holds no run"
    raise WrongUsage(f"no run {run!r} in {root}: {there}; give a name, or --storage, or the run's folder")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _RUN_FILES)


def status_of(folder: Path) -> Status:
    """Raises TryAgain where the run never had a status."""
    newest = read_status(folder)
    if newest is None:
        raise TryAgain(
            f"the run in {folder} has no status yet: its driver has only begun, or ended before it wrote "
            "one; try again in a moment"
        )
    return newest


@click.command()
@click.argument("run")
@json_option
@storage_option
def status(run: str, as_json: bool, storage: str | None) -> None:
    """What RUN is doing now."""
    newest = status_of(find_run(run, storage))
    if as_json:
        click.echo(jsonl.encode(dataclasses.asdict(newest)))
    else:
        click.echo(describe(newest, time.time()), err=True)


@click.command()
@click.argument("run")
@storage_option
def watch(run: str, storage: str | None) -> None:
    """Follow RUN until it ends."""
    from worldline.tracking.console import make_console

    folder = find_run(run, storage)
    events = jsonl.Follower(folder / EVENTS)
    while events.read():  # what happened before is in the log
        pass
    console = make_console()
    newest: Status | None = None
    try:
        while newest is None or not newest.state.over:
            seen = read_status(folder)
            newest = newest if seen is None else dataclasses.replace(seen, storage=str(folder))
            for fields in events.read():
                console.event(event_of(fields))
            if newest is not None:
                last = jsonl.read_last(folder / STEPS)
                console.update(newest, None if last is None else last["lr"])
            if newest is None or not newest.state.over:
                time.sleep(POLL_S)
    finally:
        console.close("" if newest is None or newest.state.over else f"{run} goes on without a watcher")


@click.command()
@click.argument("run_a")
@click.argument("run_b")
@storage_option
def verify(run_a: str, run_b: str, storage: str | None) -> None:
    """Whether RUN_A and RUN_B walked the same line. Exits 1 at the first differing step and field."""
    from worldline.tracking.verify import compare

    steps = []
    for run in (run_a, run_b):
        try:
            steps.append(read_steps(find_run(run, storage) / STEPS))
        except ValueError as error:
            _fail(str(error))
    result = compare(steps[0], steps[1])
    counts = f"{run_a} has {result.num_a} steps, {run_b} has {result.num_b}"
    if result.difference is not None:
        _fail(f"different: {result.difference} ({counts})")
    if result.num_common == 0:
        _fail(f"nothing to compare: {counts}")
    common = f"{result.num_common} common steps, {result.num_digests} with digests of the whole state"
    click.echo(f"equal, bit by bit: {common} ({counts})", err=True)


@click.command()
@click.argument("run")
@json_option
@storage_option
def audit(run: str, as_json: bool, storage: str | None) -> None:
    """Whether RUN trained every row once. Exits 1 if its log does not prove it.

    Plans anew, from the stored job and manifest, which rows each step had to train, and compares their digest
    with the one that the workers took of the rows they were given.
    """
    from worldline.data.audit import audit as hold_against
    from worldline.data.manifest import Manifest
    from worldline.job.spec import Job
    from worldline.worker.plans import training_plan

    folder = find_run(run, storage)
    try:
        job = Job.model_validate(json.loads((folder / RUN).read_text())["job"])
        manifest = Manifest.from_json((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise WrongUsage(
            f"{error.filename} is missing: nothing says which rows the run had to train"
        ) from error
    plan = training_plan(job, manifest, transform_digest="")  # plays no part in which rows a step trains
    try:
        result = hold_against(plan, read_steps(folder / STEPS))
    except ValueError as error:
        _fail(str(error))
    if result.num_steps == 0:
        _fail(f"nothing to audit: {run} has no completed step")
    if as_json:
        counts = {"steps": result.num_steps, "skipped": result.num_skipped, "rows": result.rows}
        epochs = [dataclasses.asdict(epoch) | {"of_rows": manifest.num_rows} for epoch in result.epochs]
        proven = not result.faults
        click.echo(
            json.dumps(
                {"run": job.name, "every_row_once": proven}
                | counts
                | {"epochs": epochs, "faults": result.faults}
            )
        )
    else:
        for line in describe_audit(job.name, result, manifest.num_rows):
            click.echo(line, err=True)
    if result.faults:
        sys.exit(1)


@click.command()
@click.argument("run")
@storage_option
def report(run: str, storage: str | None) -> None:
    """Write RUN's report.html and report.png into its folder."""
    from worldline.tracking.report import write_report

    folder = find_run(run, storage)
    try:
        click.echo(f"wrote {write_report(folder)}", err=True)
    except ValueError as error:
        _fail(str(error))


def describe(status: Status, now: float) -> str:
    """A status in a few aligned lines."""
    of = "" if status.steps is None else f" of {status.steps}"
    leaving = f", {status.leaving} leaving" if status.leaving else ""
    lines = [
        ("run", status.run),
        ("state", f"{status.state.value}{f': {status.reason}' if status.reason else ''}"),
        ("step", f"{status.step}{of}, epoch {status.epoch}"),
        ("world", f"{status.world} ({status.min} to {status.max}), {status.standbys} standing by{leaving}"),
        ("attempt", f"{status.attempt}, generation {status.generation}, {status.incidents} incidents"),
    ]
    if status.loss is not None:
        lines.append(("loss", f"{status.loss:.6g}"))
    if status.rows_per_s is not None:
        lines.append(("rows/s", f"{status.rows_per_s:,.0f}"))
    if status.goodput is not None:
        lines.append(("goodput", f"{status.goodput:.1%}"))
    if status.mlflow_run_id:
        lines.append(("mlflow", status.mlflow_run_id))
    lines += [("storage", status.storage), ("updated", f"{max(now - status.updated, 0):.0f} s ago")]
    lines += [
        (
            "worker" if k == 0 else "",
            f"rank {w.rank}  pid {w.pid}  node {w.node[:NODE]} {w.ip}  step {w.step}  {w.phase}",
        )
        for k, w in enumerate(status.workers)
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def describe_audit(name: str, result: Audit, num_rows: int) -> Iterator[str]:
    for fault in result.faults:
        yield f"not proven: {fault}"
    if result.faults:
        return
    counts = f"{result.rows:,} rows in {result.num_steps:,} steps"
    yield f"every row once: {name} trained {counts}, each step the rows that the plan demands"
    for epoch in result.epochs:
        once = "each exactly once" if epoch.complete else "none twice; the epoch is not complete"
        yield f"  epoch {epoch.epoch}  {epoch.rows:,} of {num_rows:,} rows, {once}"
    if result.num_skipped:
        yield f"  {result.num_skipped:,} steps left their update out because it was not finite"


def _fail(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(1)


COMMANDS = [status, watch, verify, audit, report]
