"""gloo's event loops, as the kernel shows them: what each waits for, and how to make one wait for nothing.

gloo's TCP transport watches its sockets level-triggered. When an operation failed, its buffers are gone, but
not what is still to be sent from them or received into them: the loop is told again and again, as fast as the
processor can, of a socket that it does nothing with. One peer that enters the operation a little later than
the others learn of a death suffices, and from then on a core is lost for every group that was left.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

EPOLL_CTL_MOD = 3
DESCRIPTORS = Path("/proc/self/fd")
WATCHED = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)
NOTHING = select.EPOLLET
"""What the kernel tells without being asked, the end of a connection, it then tells once."""


class _Event(ctypes.Structure):
    """struct epoll_event, which is packed on x86-64 only."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


_libc = ctypes.CDLL(None)
_one_at_a_time = threading.Lock()
_left: list[int] = []
"""Loops of groups that were left, until they are seen to be quiet."""
_leaving = threading.Lock()

Made = TypeVar("Made")


def loops_of(make: Callable[[], Made]) -> tuple[Made, tuple[int, ...]]:
    """What `make` makes, and the epoll descriptors that came with it.

    Other threads of the process may open one meanwhile, so only those that watch a listening socket count,
    as the loop of a gloo device does.
    """
    with _one_at_a_time:
        before = set(_epolls())
        made = make()
        return made, tuple(fd for fd in _epolls() if fd not in before and _listens(fd))


def leave(loops: Iterable[int]) -> None:
    """The loops wait for nothing on their connections any more. They must live as long as the process.

    What gloo itself still does with a connection, such as closing it, stays possible. Its own thread may just
    have been about to watch one again; so `settle()` once more, a little later.
    """
    with _leaving:
        _left.extend(loops)
    settle()


def settle() -> None:
    with _leaving:
        _left[:] = [loop for loop in _left if not _quieten(loop)]


def _quieten(loop: int) -> bool:
    """Whether all was quiet already."""
    quiet = True
    for fd, events, data in list(_watched(loop)):
        if events != NOTHING and _is_connection(fd):
            quiet = False
            # It may be closed by now, by gloo's own thread; then there is nothing to be quietened.
            _libc.epoll_ctl(loop, EPOLL_CTL_MOD, fd, ctypes.byref(_Event(NOTHING, data)))
    return quiet


def _epolls() -> Iterator[int]:
    for entry in DESCRIPTORS.glob("*"):
        try:
            if os.readlink(entry) == "anon_inode:[eventpoll]":
                yield int(entry.name)
        except FileNotFoundError:
            pass


def _watched(loop: int) -> Iterator[tuple[int, int, int]]:
    """(descriptor, events, the loop's own word) of all that it watches."""
    try:
        content = Path(f"/proc/self/fdinfo/{loop}").read_text()
    except FileNotFoundError:
        return
    for fd, events, data in WATCHED.findall(content):
        yield int(fd), int(events, 16), int(data, 16)


def _listens(loop: int) -> bool:
    return any(_socket_option(fd, socket.SO_ACCEPTCONN) == 1 for fd, _, _ in _watched(loop))


def _is_connection(fd: int) -> bool:
    return _socket_option(fd, socket.SO_ACCEPTCONN) == 0


def _socket_option(fd: int, option: int) -> int | None:
    """None: it is no socket, or is closed."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        own = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with own:
        return own.getsockopt(socket.SOL_SOCKET, option)
