"""A run's identity in its storage: created once, checked by every later attempt."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldline.control.lease import Lease
from worldline.data.manifest import Manifest
from worldline.job.faults import JobError
from worldline.job.load import identity, job_digest
from worldline.job.spec import Job
from worldline.storage import NotFound, Storage, open_storage

RUN = "run.json"


def open_run(storage: Storage, job: Job) -> dict[str, Any]:
    """Create `run.json`, or check that this job continues the run that it describes.

    Raises JobError with one fault for each setting that decides the numbers and differs.
    """
    ours = identity(job)
    content = {
        "run": job.name,
        "created": time.time(),
        "job_digest": job_digest(job),
        "identity": ours,
        "job": job.model_dump(mode="json", by_alias=True),
    }
    if storage.create(RUN, json.dumps(content, indent=1).encode()):
        return content
    stored: dict[str, Any] = json.loads(storage.get(RUN))
    faults = identity_faults(stored["identity"], ours)
    if faults:
        raise JobError(faults)
    return stored


def identity_faults(stored: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    return [
        f"{key}: the run was begun with {stored.get(key, 'its default')}, the job now says "
        f"{ours.get(key, 'its default')}; put it back, give the job another name, or begin anew with "
        "--resume never"
        for key in sorted({*stored, *ours})
        if stored.get(key) != ours.get(key)
    ]


def keep_manifest(storage: Storage, key: str, found: Manifest, where: str) -> Manifest:
    """Store the manifest of a new run; later, make sure that the data set is still the same.

    Raises JobError naming the first file that differs.
    """
    if storage.create(key, found.to_json().encode()):
        return found
    try:
        stored = Manifest.from_json(storage.get(key).decode())
    except NotFound:
        return found
    if stored.digest != found.digest:
        raise JobError(
            [f"{where}: the data set is not the one the run was begun with: {_changed(stored, found)}"]
        )
    return found


def _changed(stored: Manifest, found: Manifest) -> str:
    before = {file.path: file for file in stored.files}
    now = {file.path: file for file in found.files}
    for path in sorted({*before, *now}):
        if path not in now:
            return f"{path} is gone"
        if path not in before:
            return f"{path} is new"
        if before[path] != now[path]:
            return f"{path} has changed"
    return "the columns differ"


def set_aside(storage_url: str, name: str) -> Path | None:
    """Rename the run's folder so that a new run of the name can begin. Returns where it is now.

    Raises LeaseHeld while a driver has the run.
    """
    storage = open_storage(storage_url)
    folder = storage.local_path(name)
    if folder is None or not folder.exists():
        return None
    Lease.acquire(storage.child(name)).release()
    number = 1
    while (aside := folder.with_name(f"{name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
