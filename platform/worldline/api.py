"""What Python programs call: `worldline.train(job)`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldline.control.chaos import Script
from worldline.control.launch import Result, launch
from worldline.control.runs import set_aside
from worldline.job.faults import JobError, validation_faults
from worldline.job.spec import Job
from worldline.tracking.console import Console, make_console

DEFAULT_STORAGE = "./runs"


def train(
    job: Job | Mapping[str, Any],
    *,
    storage: str | os.PathLike[str] | None = None,
    resume: bool = True,
    search: Sequence[Path] = (),
    console: Console | None = None,
    chaos: Script | None = None,
) -> Result:
    """Train a job to its last step and say how that ended.

    job: a `Job`, or its content as in a job file. storage: where runs live; before the job's own, default
    ./runs. resume: go on with the run of this name, if there is one; otherwise it is set aside. search:
    folders for the task's module, before Python's own path; the working directory is always searched. chaos:
    what shall go wrong on the way. Blocks.

    Raises JobError for a bad job, LeaseHeld if another driver has the run, NoUsableCheckpoint and
    StorageError.
    """
    from pydantic import ValidationError

    if not isinstance(job, Job):
        try:
            job = Job.model_validate(job)
        except ValidationError as error:
            raise JobError(validation_faults(error)) from None
    url = os.fspath(storage) if storage is not None else job.checkpoint.storage or DEFAULT_STORAGE
    if not resume:
        set_aside(url, job.name)
    return launch(job, url, [*search, Path.cwd()], console or make_console(), chaos)
