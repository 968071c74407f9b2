"""SIGTERM and Ctrl-C, also where somebody else installs handlers in between."""

import os
import signal

import pytest

from worldline.control import interrupts
from worldline.control.interrupts import handlers_kept, stop_on_signals
from worldline.control.signals import StopRequested


def start_of_ray():
    """Takes the signals for itself."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def send(number):
    os.kill(os.getpid(), number)


def test_signals_stop_the_run_before_during_and_after_rays_start():
    posted = []
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(posted.append):
        send(signal.SIGTERM)
        with handlers_kept():
            send(signal.SIGTERM)
            start_of_ray()
        send(signal.SIGTERM)
    assert posted == [StopRequested("SIGTERM", 75)] * 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_interrupt_interrupts_wherever_the_first_came(monkeypatch):
    posted = []
    now = [5.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    with stop_on_signals(posted.append):
        with handlers_kept():
            send(signal.SIGINT)
            start_of_ray()
        send(signal.SIGINT)  # an echo of the first
        now[0] += 1.5
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert posted == [StopRequested("interrupted", 130)]
