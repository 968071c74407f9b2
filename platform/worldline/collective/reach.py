"""Why ranks did not meet: who has not come, and who cannot be reached from here."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

PROBE_S = 2.0
NAMED = 4
"""Of more ranks than that, only their number is told."""

Place = tuple[str, int]
"""Address and port."""


class Door:
    """A port of this node's that others may knock at, open while its rank meets them.

    Protocol: `announce` it in the store where the ranks meet; where meeting takes long, `unreached` looks up
    the others' doors there and knocks at each, and where they did not meet, `complaint` also says who has not
    come. The connection is nothing but the proof that one is possible.
    """

    def __init__(self, rank: int, size: int, address: str) -> None:
        self._rank, self._size, self._address = rank, size, address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener: socket.socket | None = socket.create_server((address, 0), family=family)
        except OSError:
            self._listener = None  # such an address serves nobody, and forming will say so

    def announce(self, store: Any) -> None:
        if self._listener is not None:
            store.set(_key(self._rank), f"{self._address} {self._listener.getsockname()[1]}")

    def unreached(self, store: Any) -> str:
        """Which of those who have come cannot be reached; empty if all can. Takes at most PROBE_S, and the
        store's time."""
        doors = self._doors(store)
        silent = unreachable(doors, PROBE_S)
        if not silent:
            return ""
        parts = [f"rank {rank} at {doors[rank][0]}: {why}" for rank, why in list(silent.items())[:NAMED]]
        more = f", and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
        return f"rank {self._rank} at {self._address} cannot reach {', '.join(parts)}{more}"

    def complaint(self, store: Any) -> str:
        """Who cannot be reached, else who has not come; empty if all have come and can be reached."""
        return self.unreached(store) or self._absent(store)

    def _absent(self, store: Any) -> str:
        absent = [rank for rank in range(self._size) if rank != self._rank and not store.check([_key(rank)])]
        if len(absent) > NAMED:
            return f"{len(absent)} ranks did not come"
        ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        return f"{ranks} did not come" if absent else ""

    def _doors(self, store: Any) -> dict[int, Place]:
        doors: dict[int, Place] = {}
        for rank in range(self._size):
            if rank != self._rank and store.check([_key(rank)]):
                address, _, port = store.get(_key(rank)).decode().partition(" ")
                doors[rank] = address, int(port)
        return doors

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def unreachable(doors: Mapping[int, Place], within_s: float) -> dict[int, str]:
    """Those of the doors to which no connection can be made in that time, with the reason.

    One that is shut, as its rank has stopped meeting, answers, too.
    """
    silent = dict.fromkeys(doors, f"no answer in {within_s:g} s")
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, place in doors.items():
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            knock = stack.enter_context(socket.socket(family))
            knock.setblocking(False)
            code = knock.connect_ex(place)
            if code == errno.EINPROGRESS:
                selector.register(knock, selectors.EVENT_WRITE, rank)
            else:
                _note(silent, rank, code)
        deadline = time.monotonic() + within_s
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                knock = key.fileobj  # type: ignore[assignment]
                _note(silent, key.data, knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                selector.unregister(knock)
    return silent


def _note(silent: dict[int, str], rank: int, code: int) -> None:
    if code in (0, errno.ECONNREFUSED):
        del silent[rank]
    else:
        silent[rank] = errno.errorcode.get(code, str(code))


def _key(rank: int) -> str:
    return f"door/{rank}"
