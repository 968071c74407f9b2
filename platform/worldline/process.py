"""Which process something belongs to, and whether that process is gone. Imports nothing of ours.

A pid alone proves nothing: it is used again, and means another process on another machine or in another
container. A pid, its start time and the pid namespace of one boot of one kernel name one process for ever.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Liveness(Enum):
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"  # runs, or ran, where this process cannot look


@dataclass(frozen=True)
class ProcessId:
    """One process.

    machine: boot id and pid namespace, empty where the system does not tell. start: clock ticks since the
    boot.
    """

    host: str
    machine: str
    pid: int
    start: int

    @staticmethod
    def current() -> ProcessId:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
        except OSError:
            machine = ""
        return ProcessId(socket.gethostname(), machine, os.getpid(), start_time(os.getpid()) or 0)

    def liveness(self, seen_from: ProcessId) -> Liveness:
        """`seen_from` is the process that looks, that is `ProcessId.current()`."""
        if not self.machine or self.machine != seen_from.machine:
            return Liveness.UNKNOWN
        return Liveness.ALIVE if start_time(self.pid) == self.start else Liveness.GONE


def start_time(pid: int) -> int | None:
    """When the process with this pid started, in clock ticks since the boot.

    None if there is none, or a zombie, which does nothing any more.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the command before it may hold spaces and brackets
    return None if state in "ZX" else int(fields[18])
