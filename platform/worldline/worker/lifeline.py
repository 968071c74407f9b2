"""A worker's end of its lifeline: a connection that tells each side at once when the other is gone."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

CONNECT_S = 10.0
UNREACHABLE_S = 60.0
"""A worker whose signs of life reach nobody for so long ends itself: its place is another's by then."""


@dataclass(frozen=True)
class Anchor:
    """Where the controller holds the lifelines. token: what proves a worker to be of this attempt.

    beat_s: seconds between two signs of life.
    """

    host: str
    port: int
    token: str
    beat_s: float


@dataclass(frozen=True)
class Greeting:
    """The first thing that a worker says, as a line of JSON."""

    token: str
    id: str
    pid: int
    node: str
    ip: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class Lifeline:
    """Held as long as the process lives, by a thread of its own.

    Protocol: `hold` connects and greets; from then on it sends a byte every `beat_s` and reads nothing. The
    kernel closes the connection when the process dies, however it dies, so that the controller knows of it
    without asking anybody. And when the controller closes it, because it gave the worker up or because it is
    gone itself, `cut` is called: what an abandoned worker would still do, nobody wants any more.
    """

    def __init__(self, connection: socket.socket, beat_s: float, cut: Callable[[str], None]) -> None:
        self._connection = connection
        self._beat_s = beat_s
        self._cut = cut
        threading.Thread(target=self._run, name="lifeline", daemon=True).start()

    @classmethod
    def hold(cls, anchor: Anchor, id: str, node: str, ip: str, cut: Callable[[str], None]) -> Lifeline:
        """Raises ConnectionError, with both addresses, where the controller cannot be reached."""
        try:
            connection = socket.create_connection((anchor.host, anchor.port), CONNECT_S)
        except OSError as error:
            raise ConnectionError(
                f"worker {id} on {ip} cannot reach the controller at {anchor.host}:{anchor.port}: {error}; "
                "nodes of the cluster must reach each other on all ports"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREACHABLE_S * 1e3))
        connection.sendall(Greeting(anchor.token, id, os.getpid(), node, ip).encode())
        return cls(connection, anchor.beat_s, cut)

    def _run(self) -> None:
        try:
            while not select.select([self._connection], [], [], self._beat_s)[0]:
                self._connection.send(b".")
            reason = "the controller closed the lifeline"
        except OSError as error:
            reason = f"the controller cannot be reached: {error}"
        self._cut(reason)


def end_process(reason: str) -> NoReturn:
    """At once, whatever the other threads are doing: this worker's place is another's now."""
    print(f"worker process {os.getpid()} ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
