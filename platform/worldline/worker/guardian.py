"""Ends what a worker leaves behind. A program of its own, started by `family`, with a few modules and 4 MB.

It waits for the end of the worker or of the raylet that started it; without its raylet a worker is of no use
to anybody, and keeps what it holds, so it is ended. Then every process of the worker's family gets SIGKILL,
until CALM looks in a row find none or SWEEP_S is over. (One look can miss a process whose parent forks it and
ends meanwhile.) Of the family are

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


def guard(worker: int, raylet: int, group: int, token: str) -> None:
    """Return when the worker and its family are gone. worker, raylet: pidfds."""
    _wait(worker, raylet)
    deadline = time.monotonic() + SWEEP_S
    calm = 0
    while calm < CALM and time.monotonic() < deadline:
        calm = 0 if sweep(group, token) else calm + 1
        time.sleep(PAUSE_S)


def sweep(group: int, token: str) -> int:
    """Kill all of the family that are alive. Returns how many were found."""
    others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    return sum(_end(pid, group, token) for pid in others)


def mapping(token: str) -> str:
    return f"worldline-{token}"


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


def _end(pid: int, group: int, token: str) -> bool:
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _belongs(pid, group, token):
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:  # gone meanwhile, or another user's
        return False
    finally:
        os.close(process)


def _belongs(pid: int, group: int, token: str) -> bool:
    state, _, found, *_ = _read(pid, "stat").rpartition(b")")[2].split()
    if state in b"ZX":
        return False
    return (
        int(found) == group
        or f"{MARK}={token}".encode() in _read(pid, "environ").split(b"\0")
        or mapping(token).encode() in _read(pid, "maps")
    )


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def main(worker: str, raylet: str, group: str, token: str) -> None:
    # No child of the worker's, which Ray would kill with the others before the worker is gone.
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(int(worker), int(raylet), int(group), token)


if __name__ == "__main__":
    main(*sys.argv[1:])
