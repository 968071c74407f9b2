"""Saving: parts in the background of every worker, then one commit, then the old ones go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from worldline.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    CheckpointError,
    CheckpointManifest,
    directory,
    files_by_step,
    part_issue,
)
from worldline.checkpoint.part import PartInfo, write_part
from worldline.storage import NotFound, Storage, StorageError

__all__ = ["PartInfo", "PartResult", "PartWriter", "commit", "prune", "write_part"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartResult:
    """How the writing of one part ended: `info` if it is durable, otherwise `error`."""

    step: int
    name: str
    seconds: float
    info: PartInfo | None = None
    error: str | None = None


class PartWriter:
    """Writes the parts of one worker in a thread of its own, so that slow storage never holds up a step.

    `submit` takes tensors that nobody changes any more (a snapshot) and returns at once. One part is written
    at a time and at most one waits, to bound the memory: a newer one takes the place of the one that waits,
    which then fails. Every submitted part ends in exactly one call of `on_result`, from the thread, and a
    part that fails does not keep later ones from being written.
    """

    def __init__(self, storage: Storage, on_result: Callable[[PartResult], None]) -> None:
        self._storage = storage
        self._on_result = on_result
        self._changed = threading.Condition()
        self._waiting: tuple[int, str, Mapping[str, torch.Tensor]] | None = None
        self._replaced: list[PartResult] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(self, step: int, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the checkpoint writer is closed")
            if self._waiting is not None:
                old_step, old_name, _ = self._waiting
                error = f"not written: the storage is so slow that the checkpoint of step {step} came first"
                self._replaced.append(PartResult(old_step, old_name, 0.0, error=error))
            self._waiting = (step, name, tensors)
            self._changed.notify()

    def close(self, timeout: float) -> bool:
        """Take no more parts. True if those submitted have ended within `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._replaced or self._closed)
                replaced, self._replaced = self._replaced, []
                part, self._waiting = self._waiting, None
            for result in replaced:
                self._report(result)
            if part is not None:
                self._report(self._write(*part))
                del part  # a snapshot is as large as the state: free it before the next wait
            elif not replaced:
                return

    def _write(self, step: int, name: str, tensors: Mapping[str, torch.Tensor]) -> PartResult:
        start = time.perf_counter()
        info, reason = None, None
        try:
            info = write_part(self._storage, directory(step), name, tensors)
        except Exception as error:
            reason = str(error) or type(error).__name__
        return PartResult(step, name, time.perf_counter() - start, info, reason)

    def _report(self, result: PartResult) -> None:
        try:
            self._on_result(result)
        except Exception:
            log.exception(
                "the result of checkpoint part %s of step %d was not taken", result.name, result.step
            )


def commit(storage: Storage, manifest: CheckpointManifest) -> None:
    """Make written parts a checkpoint. When this returns it is durable and reads back.

    Raises StorageError, and CheckpointError if a part is not there or a later attempt or generation has
    committed this step. Two saves of a step in one generation are the same state.
    """
    folder = directory(manifest.step)
    for name, entry in manifest.files.items():
        try:
            size = storage.size(f"{folder}/{name}")
        except NotFound:
            raise CheckpointError(
                f"part {folder}/{name} is written but not to be seen in {storage.url} from here; "
                "all nodes must share this storage"
            ) from None
        if size != entry.size:
            raise CheckpointError(f"part {folder}/{name} has {size} bytes instead of {entry.size}")
    existing = _committed(storage, manifest.step)
    if existing is not None and existing.issue > manifest.issue:
        raise CheckpointError(
            f"step {manifest.step} was committed by (attempt, generation) {existing.issue}, "
            f"which is later than {manifest.issue}"
        )
    key, data = f"{folder}/{MANIFEST}", manifest.to_json().encode()
    storage.put(key, data)
    if storage.get(key) != data:
        raise CheckpointError(f"{key} does not read back as it was written")


def prune(storage: Storage, keep: int, warn: Callable[[str], None]) -> None:
    """Delete what the newest `keep` committed checkpoints make superfluous.

    That is older ones, saves older than the newest that never became one, and parts of earlier saves of a
    step. The newest is the one committed last: those of later steps, which an earlier attempt left and this
    one passed over, neither count nor go. Foreign and damaged manifests are left for a person.

    Never raises for the storage: what could not be deleted is left for the next time and given to `warn`.
    """

    def delete(*keys: str) -> None:
        try:
            for key in keys:
                storage.delete(key)
        except StorageError as error:
            warn(f"an old checkpoint stays: {error}")

    try:
        files = files_by_step(storage.list(FOLDER))
        found = [_committed(storage, step) for step in files]
        storage.clear_stale()
    except StorageError as error:
        warn(f"old checkpoints stay: {error}")
        return
    manifests = [manifest for manifest in found if manifest is not None]
    if not manifests:
        return
    newest = max(manifests, key=lambda manifest: (manifest.issue, manifest.step)).step
    committed = sorted((m for m in manifests if m.step <= newest), key=lambda manifest: manifest.step)
    for manifest in committed[:-keep]:
        # The manifest first: what a crash leaves of the rest is no checkpoint.
        delete(f"{directory(manifest.step)}/{MANIFEST}", directory(manifest.step))
    for step, names in files.items():
        if step < newest and MANIFEST not in names:
            delete(directory(step))
    for manifest in committed[-keep:]:
        for name in files[manifest.step]:
            issue = part_issue(name)
            if issue is not None and issue <= manifest.issue and name not in manifest.files:
                delete(f"{directory(manifest.step)}/{name}")


def _committed(storage: Storage, step: int) -> CheckpointManifest | None:
    """The manifest of a step; None if there is none that can be read as one."""
    try:
        return CheckpointManifest.from_json(storage.get(f"{directory(step)}/{MANIFEST}"))
    except (NotFound, CheckpointError):
        return None
