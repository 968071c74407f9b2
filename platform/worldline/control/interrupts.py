"""SIGTERM and Ctrl-C as signals to the controller."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from worldline.control.signals import StopRequested

STOPPED, INTERRUPTED = 75, 130


@contextlib.contextmanager
def stop_on_signals(post: Callable[[StopRequested], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run in order, also while it starts; a second Ctrl-C interrupts that.

    Only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        post(StopRequested("SIGTERM", STOPPED))

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        post(StopRequested("interrupted", INTERRUPTED))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
