"""Append-only files of JSON objects, one a line: written by one process, followed by any number."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Fields = dict[str, Any]

_encode = json.JSONEncoder(allow_nan=False).encode
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXT = frozenset({"reason"})  # free text, in which "NaN" is a word


def encode(fields: Fields) -> str:
    """One line without its newline. Floats round-trip exactly.

    JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", which
    every language's float parser reads.
    """
    try:
        return _encode(fields)
    except ValueError:
        return _encode(_named(fields))


def decode(line: bytes | str) -> Fields:
    """The object of one line; the strings that stand for non-finite numbers are numbers again."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object: {line[:80]!r}")
    for key, value in fields.items():
        if isinstance(value, str):
            if value in _NONFINITE and key not in _TEXT:
                fields[key] = _NONFINITE[value]
        elif isinstance(value, dict):
            fields[key] = {k: _NONFINITE.get(v, v) if isinstance(v, str) else v for k, v in value.items()}
    return fields


def read(path: Path) -> list[Fields]:
    """Every whole line. A torn last line is left out, a missing file is empty.

    Raises ValueError, naming the line, where a line before the last is damaged.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")
    out = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                out.append(decode(line))
        except ValueError as error:
            if not any(lines[number:]):
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
    return out


class JsonLines:
    """The writer's end of one file.

    Protocol: one process writes. Opening drops what a crash tore off the end. `write` hands whole lines to
    the operating system in one call, so they survive the death of the process; `sync` makes them survive that
    of the machine. `rewrite` replaces the file in one rename: a follower sees either the old or the new.
    `take_over` does so with a copy: a writer before this one, which thaws and does not know yet that it has
    lost the run, goes on with a file that nobody reads.

    `write` never raises: what a full disk does not take is kept in memory and goes first with the next one.
    As long as there is any, `sync` and `rewrite` raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = b""
        self._lock = threading.RLock()  # one thread writes, another syncs
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        end, self.last = _intact_end(self._fd, size)
        if end < size:
            os.ftruncate(self._fd, end)
        self.first = read_first(self.path)

    def write(self, lines: Sequence[str]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._kept += b"".join(line.encode() + b"\n" for line in lines)
            self._hand_over()

    def _hand_over(self) -> None:
        try:
            while self._kept:
                self._kept = self._kept[os.write(self._fd, self._kept) :]
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path}: {error.strerror}") from error

    def sync(self) -> None:
        with self._lock:
            self._hand_over()
            fd = os.dup(self._fd)
        try:
            os.fsync(fd)  # may take long, and nobody's line waits for it
        finally:
            os.close(fd)

    def rewrite(self, keep: Callable[[Fields], bool]) -> None:
        with self._lock:
            self._rewrite(keep)

    def take_over(self) -> None:
        with self._lock:
            self._rewrite(None)

    def _rewrite(self, keep: Callable[[Fields], bool] | None) -> None:
        self._hand_over()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(self.path, "rb") as old, open(temporary, "wb") as new:
            if keep is None:
                shutil.copyfileobj(old, new)
            else:
                new.writelines(line for line in old if keep(decode(line)))
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, self.path)
        _sync_folder(self.path.parent)
        os.close(self._fd)
        self._open()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                self.write([])
                os.close(self._fd)
                self._fd = -1


class Follower:
    """A reader's end: what was added since the last look.

    `read` gives whole new lines, at most about `limit` bytes of them. `restarted` is True after a read that
    began anew because the file was replaced: what it gives then starts from the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self.restarted = False

    def read(self, limit: int = 1 << 20) -> list[Fields]:
        self.restarted = False
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return []
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self.restarted = self._inode >= 0
                self._inode, self._offset = stat.st_ino, 0
            file.seek(self._offset)
            data = file.read(limit)
            if b"\n" not in data and len(data) == limit:  # a line longer than the limit
                data += file.readline()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [decode(line) for line in whole.splitlines() if line]


def read_first(path: Path) -> Fields | None:
    with open(path, "rb") as file:
        line = file.readline()
    return decode(line) if line.endswith(b"\n") else None


def read_last(path: Path) -> Fields | None:
    """The last whole line, read from the end of the file; None where there is none."""
    try:
        with open(path, "rb") as file:
            return _intact_end(file.fileno(), os.fstat(file.fileno()).st_size)[1]
    except FileNotFoundError:
        return None


def _intact_end(fd: int, size: int) -> tuple[int, Fields | None]:
    """Where the last whole, readable line ends, and what it says. Reads a growing part of the file's end."""
    block = min(1 << 16, size)
    while True:
        data = os.pread(fd, block, size - block)
        start = size - block
        if start:  # the first line may have begun before this block
            cut = data.find(b"\n") + 1
            data, start = (data[cut:], start + cut) if cut else (b"", size)
        end = data.rfind(b"\n") + 1
        while end > 0:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            try:
                return start + end, decode(data[begin:end])
            except ValueError:
                end = begin
        if block == size:
            return 0, None
        block = min(block * 16, size)


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return value


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
