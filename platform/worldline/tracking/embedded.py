"""The MLflow database beside the runs, which is used where the job names no server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_SCHEME = "sqlite:///"


def embedded_uri(storage: Path) -> str:
    """The database of a storage folder; artifacts lie in `mlartifacts` beside it."""
    return f"{_SCHEME}{storage.resolve() / 'mlflow.db'}"


def artifact_location(uri: str) -> str | None:
    """Beside an embedded database; a server knows its own."""
    path = _database(uri)
    return None if path is None else (path.parent / "mlartifacts").resolve().as_uri()


def make_database(uri: str, user: str, fill: Callable[[str], object]) -> None:
    """Make an embedded database, whole or not at all, unless it is there.

    MLflow makes its tables in dozens of steps and cannot go on where a process was killed between two of
    them: nobody could open that database again. user: names the file in which it grows; no two processes use
    one at a time. fill: makes the tables of the database at this URI and closes it.
    """
    path = _database(uri)
    if path is None or path.exists():
        return
    growing = path.with_name(f".{path.name}.{user}")
    for left in path.parent.glob(f"{growing.name}*"):  # with its journal
        left.unlink(missing_ok=True)
    fill(f"{_SCHEME}{growing}")
    try:
        os.link(growing, path)  # unlike a rename, never over what another has made meanwhile
    except FileExistsError:
        pass
    except OSError:  # no hard links here
        if not path.exists():
            growing.rename(path)
    growing.unlink(missing_ok=True)


def _database(uri: str) -> Path | None:
    path = uri.removeprefix(_SCHEME)
    return Path(path) if uri.startswith(_SCHEME) and "?" not in path else None
