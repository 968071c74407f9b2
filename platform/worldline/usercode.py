"""Where in a user's own code an error arose. Imports nothing of ours."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_OURS = Path(__file__).resolve().parent
_INSTALLED = tuple(
    Path(path).resolve()
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "purelib", "platlib")
)


def raised(error: BaseException, search: Sequence[Path] = ()) -> str:
    """`ValueError: no such width (surface.py:12, in build_model)`: what was raised and where.

    The place is the innermost frame that is neither Worldline's nor an installed package's; where there is
    none (a module that cannot even be parsed says so itself), it is left out. search: folders that the file's
    name may be told from.
    """
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return said
    innermost = frames[-1]
    return f"{said} ({_short(innermost.filename, search)}:{innermost.lineno}, in {innermost.name})"


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not any(path.is_relative_to(folder) for folder in (_OURS, *_INSTALLED))


def _short(filename: str, search: Sequence[Path]) -> str:
    path = Path(filename).resolve()
    for folder in search:
        if path.is_relative_to(folder.resolve()):
            return str(path.relative_to(folder.resolve()))
    return str(path)
