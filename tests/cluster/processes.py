"""The processes of a scenario: which are there, and their end, by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

POLL_S = 0.01
LISTEN = "0A"  # in the kernel's tables of sockets


class Processes:
    """Those of one scenario: all that inherited `mark` in their environment, wrote themselves into `file` or
    were noted.
    """

    def __init__(self, mark: str, file: Path) -> None:
        self._mark = mark
        self._file = file
        self._noted: set[int] = set()

    def note(self, pids: Iterable[int]) -> None:
        self._noted |= set(pids)

    def alive(self) -> set[int]:
        with contextlib.suppress(FileNotFoundError):
            self._noted |= set(map(int, self._file.read_text().split()))
        return {pid for pid in self._noted | inherited(self._mark) if is_alive(pid)}

    def all_gone(self, within: float, but: Collection[int] = ()) -> None:
        deadline = time.monotonic() + within
        while alive := self.alive() - set(but):
            assert time.monotonic() < deadline, f"left behind: {[command_line(pid) for pid in alive]}"
            time.sleep(POLL_S)


def inherited(entry: str) -> set[int]:
    """Processes that were started with this entry in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def kill(pids: Iterable[int]) -> None:
    signal_all(signal.SIGKILL, pids)


def tree(pid: int) -> set[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, new = {pid}, [pid]
    while new:
        for child in children.get(new.pop(), ()):
            found.add(child)
            new.append(child)
    return found


def signal_all(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def listening(pid: int) -> set[int]:
    """TCP ports that the process listens on."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and f"socket:[{rest[5]}]" in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports
