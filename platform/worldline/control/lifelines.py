"""The controller's end of the lifelines: who is there, who is gone, who gives no sign of life."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worldline.control.signals import Arrived, Cut, Heard, Post, Silent, StopRequested
from worldline.exits import TRY_AGAIN
from worldline.worker.lifeline import Anchor, Greeting

TICK_S = 0.25
STALL_S = 1.0
"""If this process itself did not come round for so long, nobody is called silent for that."""
LONGEST_GREETING = 4096
GREETING_S = 10.0


@dataclass
class _Line:
    """One connection. id: empty before the greeting. heard: when something came last."""

    connection: socket.socket
    heard: float
    id: str = ""
    silent: bool = False
    greeting: bytearray = field(default_factory=bytearray)


class Lifelines:
    """Accepts the workers' connections and watches them, in a thread of its own.

    Protocol: workers get `anchor(host)`. A worker's first word is posted as Arrived, the end of its
    connection as Cut; no sign of life for `silent_s` seconds as Silent, and the next one after that as Heard.
    `cut(id)` closes a worker's connection, upon which its process ends itself if it still can; nothing is
    posted of that worker any more. `close` cuts all.

    The kernel of a worker's machine closes the connection of a process that dies, and this is known within
    milliseconds, also where a whole node is gone and Ray has nobody to ask. A frozen process or a link that
    is down closes nothing: that is what the signs of life are for.
    """

    def __init__(
        self,
        post: Post,
        beat_s: float,
        silent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._beat_s = beat_s
        self._silent_s = silent_s
        self._clock = clock
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._to_cut: set[str] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._lines: dict[socket.socket, _Line] = {}
        self._by_id: dict[str, _Line] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
        self._thread.start()

    def anchor(self, host: str) -> Anchor:
        return Anchor(host, self._listener.getsockname()[1], self._token, self._beat_s)

    def cut(self, id: str) -> None:
        """May be called from any thread; also for a worker that never greeted."""
        with self._lock:
            self._to_cut.add(id)
        if not self._closing:
            self._rouse()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._rouse()
        self._thread.join(timeout=5)
        # Not by the thread: it may see that this is the end before it is woken.
        self._wake.close()
        self._woken.close()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been roused often enough
            self._wake.send(b".")

    def _run(self) -> None:
        """Without this thread nobody would be known as gone or frozen, so its failure is the run's end."""
        try:
            self._watch()
        except Exception as error:
            reason = f"the workers can be watched no longer: {type(error).__name__}: {error}"
            self._post(StopRequested(reason, TRY_AGAIN))

    def _watch(self) -> None:
        last = self._clock()
        while not self._closing:
            ready = self._selector.select(TICK_S)
            now = self._clock()
            if now - last > STALL_S:
                for line in self._lines.values():
                    line.heard = now
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept(now)
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._cut_all()
                else:
                    self._read(self._lines.get(key.fileobj), now)  # type: ignore[call-overload]
            self._look_for_silence(now)
        for line in list(self._lines.values()):
            self._drop(line)
        self._listener.close()
        self._selector.close()

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it is gone again, mostly
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(TICK_S)  # it waits, and would be told of at once again
            return
        connection.setblocking(False)
        self._lines[connection] = _Line(connection, now)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, line: _Line | None, now: float) -> None:
        if line is None:
            return  # cut in this very round
        try:
            data = line.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(line)
            if line.id:
                self._post(Cut(line.id))
            return
        line.heard = now
        if not line.id:
            self._greet(line, data)
        elif line.silent:
            line.silent = False
            self._post(Heard(line.id))

    def _greet(self, line: _Line, data: bytes) -> None:
        line.greeting += data
        text, end, _ = bytes(line.greeting).partition(b"\n")
        if not end:
            if len(text) > LONGEST_GREETING:
                self._drop(line)
            return
        try:
            greeting = Greeting(**json.loads(text))
            known = hmac.compare_digest(greeting.token, self._token)
        except (TypeError, ValueError, RecursionError):
            known = False
        with self._lock:
            late = known and greeting.id in self._to_cut
        if not known or late or greeting.id in self._by_id:
            self._drop(line)
            return
        line.id = greeting.id
        self._by_id[line.id] = line
        self._post(Arrived(greeting.id, greeting.pid, greeting.node, greeting.ip))

    def _cut_all(self) -> None:
        """Ids stay noted: a worker that was given up before it came is sent away when it comes."""
        with self._lock:
            ids = [id for id in self._to_cut if id in self._by_id]
        for id in ids:
            self._drop(self._by_id[id])

    def _look_for_silence(self, now: float) -> None:
        for line in list(self._lines.values()):
            quiet_s = now - line.heard
            if not line.id:
                if quiet_s > GREETING_S:
                    self._drop(line)
            elif quiet_s > self._silent_s and not line.silent:
                line.silent = True
                self._post(Silent(line.id, quiet_s))

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.connection)
        self._lines.pop(line.connection, None)
        self._by_id.pop(line.id, None)
        line.connection.close()
