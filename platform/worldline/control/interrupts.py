"""SIGTERM and Ctrl-C as signals to the controller."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from worldline.control.signals import StopRequested
from worldline.exits import INTERRUPTED, TRY_AGAIN

ECHO_S = 1.0
"""Ctrl-C reaches a process through its shell and its parents, too: so soon after the first it is the same."""


@contextlib.contextmanager
def stop_on_signals(post: Callable[[StopRequested], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run in order, also while it starts; a second Ctrl-C interrupts that.

    Outside the main thread, which alone may set handlers, this does nothing.
    """

    def terminate(*_: object) -> None:
        # Where Ray's handler came first, it has set an alarm that ends the process.
        signal.alarm(0)
        post(StopRequested("SIGTERM", TRY_AGAIN))

    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            post(StopRequested("interrupted", INTERRUPTED))
        elif now - first > ECHO_S:
            signal.default_int_handler(number, frame)

    with handlers_kept():
        if _may_set_handlers():
            signal.signal(signal.SIGTERM, terminate)
            signal.signal(signal.SIGINT, interrupt)
        yield


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Afterwards the handlers of SIGTERM and SIGINT are what they were before, below Python, too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if _may_set_handlers():
            for number, handler in before.items():
                # None: a handler from outside Python, which cannot be set from here.
                if handler is not None:
                    signal.signal(number, handler)


def _may_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()
