"""SIGTERM to a worker is a notice that its end is near: it tells, and works on until its time is over."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from worldline.worker.orders import Notice

LEAD_S = 10.0
"""What is told: a signal says nothing of the time that is left. Slurm and Kubernetes kill 30 s later, people
and scripts often after 10."""
STAY_S = 60.0
"""Who sends SIGTERM expects the process to end: after so long it does, whoever has not answered."""
ECHO_S = 1.0
"""A signal to a process and to its group arrives twice: so soon after the first it is the same."""
TERMINATED = 128 + signal.SIGTERM


class Notices:
    """Takes SIGTERM for itself; `close` gives it back.

    tell(notice) passes it on and says whether anybody is there to hear; if not, the process ends at once. It
    ends, too, when SIGTERM comes again after ECHO_S, and STAY_S after the first. By `end`, which in a worker
    leaves without any handler: its state is with the others, or durable, or lost anyhow.

    To be made in the main thread, which alone may set handlers. In a Ray worker this executes Python
    regularly, also while an actor's methods run in other threads, and `ray.kill` sends no signal. A process
    forked from this one dies of SIGTERM as any other does.
    """

    def __init__(
        self,
        tell: Callable[[Notice], bool],
        end: Callable[[], None] = lambda: os._exit(TERMINATED),
        stay_s: float = STAY_S,
        echo_s: float = ECHO_S,
    ) -> None:
        self._tell = tell
        self._end = end
        self._stay_s = stay_s
        self._echo_s = echo_s
        self._pid = os.getpid()
        # The handler interrupts the main thread anywhere and may therefore wait for no lock: the rest is done
        # by a thread.
        self._came: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._before = signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._serve, name="notices", daemon=True).start()

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._came.put(time.monotonic())
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _serve(self) -> None:
        first = self._came.get()
        if self._tell(Notice("SIGTERM", LEAD_S)):
            self._wait(first)
        self._end()

    def _wait(self, first: float) -> None:
        """Until the signal comes again or the time is over."""
        while (left := first + self._stay_s - time.monotonic()) > 0:
            try:
                if self._came.get(timeout=left) - first > self._echo_s:
                    return
            except queue.Empty:
                return
