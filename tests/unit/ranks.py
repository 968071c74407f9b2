"""Real processes to be the ranks of a world: each does what it is told, and can be killed or stopped.

They are forked from a server that has torch imported, so a new one costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEADLINE_S = 30.0
"""Until a test counts as hung. Nothing that passes comes near it."""

_numbers = count()


class RankFailed(AssertionError):
    """What was asked of the process raised; the message is its traceback."""


class Peer:
    """One process. Functions given to it are called there with its `room` (a namespace that lasts) first.

    `start` and `result` use its main thread, `now` a second one, which answers meanwhile.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        context = multiprocessing.get_context("forkserver")
        # The first optimizer of a process imports torch._dynamo.
        context.set_forkserver_preload(["torch._dynamo", "worldline.worker.build"])
        self._main, main = context.Pipe()
        self._side, side = context.Pipe()
        self._process = context.Process(target=_serve, args=(main, side, store), daemon=True)
        self._process.start()
        main.close()
        side.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._main.send((function, args))

    def result(self) -> Any:
        """Of what was started. Raises EOFError where the process is dead."""
        return _reply(self._main)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def now(self, function: Callable[..., Any], *args: Any) -> Any:
        self._side.send((function, args))
        return _reply(self._side)

    def answered(self, timeout_s: float) -> bool:
        """Whether a result, or the news of its death, is there within that time."""
        return self._main.poll(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)

    def wait_stopped(self) -> None:
        """Until it has stopped itself with SIGSTOP."""
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


@contextmanager
def peers(number: int) -> Iterator[list[Peer]]:
    """That many processes with a store where they meet. They are killed at the end, as `another` is."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        started: list[Peer] = []
        try:
            for _ in range(number):
                started.append(Peer(f"{folder}/store"))
            yield started
        finally:
            for peer in started:
                peer.kill()


def another(started: list[Peer]) -> Peer:
    """One more process that meets the others."""
    peer = Peer(started[0].store)
    started.append(peer)
    return peer


def everywhere(members: Sequence[Peer], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the same at once in all; results by rank. The function gets (room, rank, size, prefix, *args)."""
    prefix = new_prefix()
    for rank, peer in enumerate(members):
        peer.start(function, rank, len(members), prefix, *args)
    return [peer.result() for peer in members]


def new_prefix() -> str:
    """A store prefix that no other group uses."""
    return f"group-{next(_numbers)}"


def form(
    room: SimpleNamespace,
    rank: int,
    size: int,
    prefix: str,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    form_timeout_s: float = DEADLINE_S,
    timeout_s: float = DEADLINE_S,
) -> Any:
    """In a peer: its place in a group; None in a world of one."""
    from worldline.collective.forming import form_gloo

    if size == 1:
        return None
    return form_gloo(
        room.store,
        prefix=prefix,
        rank=rank,
        size=size,
        address="127.0.0.1",
        form_timeout_s=form_timeout_s,
        timeout_s=timeout_s,
        cancelled=cancelled,
    )


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reply(connection: Connection) -> Any:
    if not connection.poll(DEADLINE_S):
        raise TimeoutError(f"no answer from a rank within {DEADLINE_S:g} s")
    good, value = connection.recv()
    if not good:
        raise RankFailed(value)
    return value


def _serve(main: Connection, side: Connection, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A file, as a connection to a TCPStore looks up names, which on some machines takes seconds.
    room = SimpleNamespace(store=dist.FileStore(store, -1))
    threading.Thread(target=_answer, args=(side, room), daemon=True).start()
    _answer(main, room)


def _answer(connection: Connection, room: SimpleNamespace) -> None:
    """Do what comes, one by one, until whoever asks is gone. Leaves at once: groups may be stuck."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            reply = True, function(room, *args)
        except BaseException:
            reply = False, traceback.format_exc()
        connection.send(reply)
