"""The command that trains: `worldline run JOB`."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from worldline.cli.options import DEFAULT_STORAGE, job_argument, set_option, storage_option
from worldline.exits import FAILED, TRY_AGAIN
from worldline.job.faults import JobError
from worldline.job.load import load_job, search_path
from worldline.storage import StorageError, open_storage


@click.command()
@job_argument
@set_option
@storage_option
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    default="auto",
    show_default=True,
    help="auto: go on with the run of this name if there is one. never: set it aside and start anew.",
)
@click.option(
    "--chaos",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A fault script: try the job against what it says goes wrong.",
)
def run(
    job_file: Path, overrides: tuple[str, ...], storage: str | None, resume: str, chaos: Path | None
) -> int:
    """Train JOB until its last step, on the cluster of RAY_ADDRESS or on a local Ray."""
    before = signal.signal(signal.SIGTERM, _stop_before_it_begins)
    try:
        return _run(job_file, overrides, storage, resume, chaos)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    job_file: Path, overrides: tuple[str, ...], storage: str | None, resume: str, chaos: Path | None
) -> int:
    # Faults of what was given are told before seconds of imports, torch and Ray among them.
    from worldline.control.chaos import load_script

    job = load_job(job_file, overrides)
    script = load_script(chaos) if chaos is not None else None
    try:
        open_storage(storage or job.checkpoint.storage or DEFAULT_STORAGE)
    except StorageError as error:
        key = "--storage" if storage else "checkpoint.storage"
        raise JobError([f"{key}: {error}; give a folder that all nodes see"]) from error

    from worldline.api import train
    from worldline.checkpoint.manifest import CheckpointError
    from worldline.control.lease import LeaseHeld
    from worldline.tracking.console import make_console

    try:
        result = train(
            job,
            storage=storage,
            resume=resume == "auto",
            search=search_path(job_file),
            console=make_console(),
            chaos=script,
        )
    except LeaseHeld as error:
        click.echo(f"try again: {error}", err=True)
        return TRY_AGAIN
    except (CheckpointError, StorageError) as error:
        click.echo(f"failed: {error}", err=True)
        return FAILED
    return result.exit_code


def _stop_before_it_begins(*_: object) -> None:
    """Until the run itself takes the signal."""
    click.echo("stopped before the training began: SIGTERM; run the same command again to begin", err=True)
    raise SystemExit(TRY_AGAIN)


COMMANDS = [run]
