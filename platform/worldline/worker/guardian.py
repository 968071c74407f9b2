"""Ends what a worker leaves behind. A program of its own, started by `family`, with a few modules and 4 MB.

It waits for the end of the worker or of the raylet that started it; without its raylet a worker is of no use
to anybody, and keeps what it holds, so it is ended. Then every process of the worker's family gets SIGKILL,
until CALM looks in a row find none or SWEEP_S is over. (One look can miss a process whose parent forks it and
ends meanwhile.) Of the family are, among those that are not older than the worker,

  - members of the worker's process group;
  - programs started with the worker's environment, of which MARK is part, in whatever session;
  - processes forked from the worker without starting a program: they share its mapping named after the token.

Not found: a program that was started with a cleaned environment and left the process group (`env -i setsid`,
`sudo`), one of another user, and what another server started on the worker's behalf (`docker run`,
`systemd-run`).

Processes are named by pidfd, never by pid alone: what is killed is what was looked at. (The group's number is
free for others only when its last member is gone, and the first look at it comes at once.)
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

MARK = "WORLDLINE_FAMILY"
SWEEP_S = 1.0
PAUSE_S = 0.02
CALM = 3


class Descendants:
    """Of the process `ancestor`, which must be alive when this is made and leads its process group."""

    def __init__(self, ancestor: int, token: str) -> None:
        self._group = ancestor
        self._program = _program(ancestor)
        self._since = _stat(ancestor)[2]
        self._entry = f"{MARK}={token}".encode()
        self._mapping = mapping(token).encode()

    def kill(self) -> int:
        """All that are alive, the ancestor too. Returns how many were found."""
        others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        return sum(self._end(pid) for pid in others)

    def _end(self, pid: int) -> bool:
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if not self._include(pid):
                return False
            signal.pidfd_send_signal(process, signal.SIGKILL)
            return True
        except OSError:  # gone meanwhile, or another user's
            return False
        finally:
            os.close(process)

    def _include(self, pid: int) -> bool:
        state, group, start = _stat(pid)
        if state in b"ZX" or start < self._since:
            return False
        if group == self._group or self._entry in _read(pid, "environ").split(b"\0"):
            return True
        # A fork runs the same program. Only then look through its mappings, which may be thousands.
        return _program(pid) == self._program and self._mapping in _read(pid, "maps")


def mapping(token: str) -> str:
    return f"worldline-{token}"


def guard(worker: int, raylet: int, descendants: Descendants) -> None:
    """Return when the worker and its descendants are gone. worker, raylet: pidfds."""
    _wait(worker, raylet)
    deadline = time.monotonic() + SWEEP_S
    calm = 0
    while calm < CALM and time.monotonic() < deadline:
        calm = 0 if descendants.kill() else calm + 1
        time.sleep(PAUSE_S)


def _wait(worker: int, raylet: int) -> None:
    ends = select.poll()
    ends.register(worker, select.POLLIN)
    ends.register(raylet, select.POLLIN)
    while worker not in {fd for fd, _ in ends.poll()}:
        ends.unregister(raylet)
        try:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        except ProcessLookupError:
            return


def _stat(pid: int) -> tuple[bytes, int, int]:
    """State, process group and start time."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # the command before may hold spaces and brackets
    return fields[0], int(fields[2]), int(fields[19])


def _program(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/exe")


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def main(worker: str, raylet: str, pid: str, token: str) -> None:
    descendants = Descendants(int(pid), token)
    # No child of the worker's, which Ray would kill with the others before the worker is gone.
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(int(worker), int(raylet), descendants)


if __name__ == "__main__":
    main(*sys.argv[1:])
