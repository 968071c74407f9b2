"""Restoring: the newest checkpoint that is whole, in spite of damaged, torn and foreign ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worldline.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    CheckpointError,
    CheckpointManifest,
    directory,
    files_by_step,
)
from worldline.checkpoint.part import check_part, read_part
from worldline.storage import NotFound, Storage


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints, none is usable, and nobody asked to start afresh.

    reasons: folder -> why it is not usable. unfinished: whether all of them are saves that never became a
    checkpoint, so that nothing which was once committed is lost.
    """

    def __init__(self, reasons: dict[str, str], unfinished: bool) -> None:
        super().__init__(reasons, unfinished)
        self.reasons = reasons
        self.unfinished = unfinished

    def __str__(self) -> str:
        lines = [f"  {folder}: {reason}" for folder, reason in self.reasons.items()]
        return "\n".join(
            [
                "none of the run's checkpoints is usable:",
                *lines,
                "Put a good copy back, or start from step 0 on purpose with --resume never.",
            ]
        )


def candidates(storage: Storage) -> dict[int, list[str]]:
    """step -> file names, the newest step first. The order is the step's, never that of any clock."""
    return dict(sorted(files_by_step(storage.list(FOLDER)).items(), reverse=True))


def find(storage: Storage, *, warn: Callable[[str], None]) -> CheckpointManifest | None:
    """The newest checkpoint of which every byte is there; None if the run has none at all.

    Each newer one that is passed over is named to `warn` with the reason. Raises NoUsableCheckpoint, and
    StorageError if the storage cannot even be listed.
    """
    reasons: dict[str, str] = {}
    unfinished = True
    for step, names in candidates(storage).items():
        try:
            if MANIFEST not in names:
                raise CheckpointError(f"has no {MANIFEST}: the save was never finished")
            unfinished = False
            return _checked(storage, step)
        except (CheckpointError, OSError) as error:
            reasons[directory(step)] = str(error)
            warn(f"checkpoint {directory(step)} is passed over: {error}")
    if reasons:
        raise NoUsableCheckpoint(reasons, unfinished)
    return None


def read(storage: Storage, manifest: CheckpointManifest) -> dict[str, torch.Tensor]:
    """All tensors, on the host, for whatever world.

    Raises CheckpointError unless every byte is as it was written, and StorageError.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, file in manifest.files.items():
        key = f"{directory(manifest.step)}/{name}"
        entries = {tensor: entry for tensor, entry in manifest.tensors.items() if entry.file == name}
        with storage.open_path(key) as path:
            try:
                tensors |= read_part(path, file, entries)
            except (CheckpointError, OSError) as error:
                raise CheckpointError(f"{key} {error}") from error
    return tensors


def _checked(storage: Storage, step: int) -> CheckpointManifest:
    manifest = CheckpointManifest.from_json(storage.get(f"{directory(step)}/{MANIFEST}"))
    if manifest.step != step:
        raise CheckpointError(f"{MANIFEST} is that of step {manifest.step}")
    for name, file in manifest.files.items():
        try:
            with storage.open_path(f"{directory(step)}/{name}") as path:
                check_part(path, file)
        except NotFound:
            raise CheckpointError(f"{name} is missing") from None
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    return manifest
