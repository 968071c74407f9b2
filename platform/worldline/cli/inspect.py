"""Commands that look at runs and change nothing: status, watch, verify, report.

They read the run's folder only. What is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from worldline.storage import StorageError, open_storage
from worldline.tracking import jsonl
from worldline.tracking.log import EVENTS, STEPS, event_of, read_steps
from worldline.tracking.status import STATUS, Status, read_status

WRONG_USAGE = 64
POLL_S = 0.25
_RUN_FILES = (STATUS, STEPS, "run.json")

storage_option = click.option(
    "--storage", default="./runs", show_default=True, help="Folder that holds the runs."
)


class WrongUsage(click.ClickException):
    exit_code = WRONG_USAGE


def find_run(run: str, storage: str) -> Path:
    """The folder of a run, given by its name under the storage or by its path.

    Raises WrongUsage, with the names that exist, where there is none.
    """
    try:
        root = Path(open_storage(storage).url)
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


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to standard output.")
@storage_option
def status(run: str, as_json: bool, storage: str) -> None:
    """What RUN is doing now."""
    folder = find_run(run, storage)
    newest = read_status(folder)
    if newest is None:
        raise WrongUsage(f"the run in {folder} has not written a status yet; try again in a moment")
    if as_json:
        click.echo(jsonl.encode(dataclasses.asdict(newest)))
    else:
        click.echo(describe(newest, time.time()), err=True)


@click.command()
@click.argument("run")
@storage_option
def watch(run: str, storage: str) -> None:
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
            newest = read_status(folder) or newest
            for fields in events.read():
                console.event(event_of(fields))
            if newest is not None:
                last = jsonl.read_last(folder / STEPS)
                console.update(newest, None if last is None else last["lr"])
            if newest is None or not newest.state.over:
                time.sleep(POLL_S)
    finally:
        console.close("" if newest is None else describe(newest, time.time()))


@click.command()
@click.argument("run_a")
@click.argument("run_b")
@storage_option
def verify(run_a: str, run_b: str, storage: str) -> None:
    """Whether RUN_A and RUN_B walked the same line. Exits 1 at the first differing step and field."""
    from worldline.tracking.verify import compare

    steps = []
    for run in (run_a, run_b):
        try:
            steps.append(read_steps(find_run(run, storage) / STEPS))
        except ValueError as error:
            _fail(str(error))
    result = compare(steps[0], steps[1])
    counts = f"{run_a} has {result.num_a} steps, {run_b} has {result.num_b}, both have {result.num_common}"
    if result.difference is not None:
        _fail(f"different: {result.difference} ({counts})")
    if result.num_common == 0:
        _fail(f"nothing to compare: {counts}")
    click.echo(f"equal: {counts}, {result.num_digests} with state digests", err=True)


@click.command()
@click.argument("run")
@storage_option
def report(run: str, storage: str) -> None:
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
    lines = [
        ("run", status.run),
        ("state", f"{status.state.value}{f': {status.reason}' if status.reason else ''}"),
        ("step", f"{status.step}{of}, epoch {status.epoch}"),
        ("world", f"{status.world} ({status.min} to {status.max}), {status.standbys} standing by"),
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
        ("worker" if k == 0 else "", f"rank {w.rank}  pid {w.pid}  {w.node} {w.ip}  step {w.step}  {w.phase}")
        for k, w in enumerate(status.workers)
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def _fail(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(1)


COMMANDS = [status, watch, verify, report]
