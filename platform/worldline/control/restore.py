"""Where the line goes on when no living worker holds its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worldline.checkpoint.manifest import CheckpointManifest, directory
from worldline.checkpoint.restore import NoUsableCheckpoint, find
from worldline.storage import Storage
from worldline.world import Position


@dataclass(frozen=True)
class RestorePoint:
    """key: the checkpoint to read, None for the start of the line."""

    position: Position
    key: str | None = None
    manifest: CheckpointManifest | None = None


def restore_point(storage: Storage, warn: Callable[[str], None]) -> RestorePoint:
    """The newest usable checkpoint; the start, if none was ever committed.

    Raises NoUsableCheckpoint if there were some and none is whole.
    """
    try:
        manifest = find(storage, warn=warn)
    except NoUsableCheckpoint as error:
        if not error.unfinished:
            raise
        manifest = None
    if manifest is None:
        return RestorePoint(Position(0))
    return RestorePoint(manifest.position, directory(manifest.step), manifest)
