"""Both ends of the lifelines, over real connections."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading

import pytest

from worldline.control.lifelines import Lifelines
from worldline.control.signals import Arrived, Cut, Heard, Silent, StopRequested
from worldline.worker.lifeline import Anchor, Greeting, Lifeline

DEADLINE_S = 30

HOLDER = """
import signal
import sys
from worldline.worker.lifeline import Anchor, Lifeline, end_process
anchor = Anchor("127.0.0.1", int(sys.argv[1]), sys.argv[2], 0.05)
Lifeline.hold(anchor, "w1", "node", "127.0.0.1", end_process)
signal.pause()
"""


class Told:
    """What was posted, one after another."""

    def __init__(self):
        self.queue = queue.SimpleQueue()

    def next(self):
        return self.queue.get(timeout=DEADLINE_S)

    def nothing_more(self):
        return self.queue.empty()


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def lifelines(told):
    lines = Lifelines(told.queue.put, beat_s=0.05, silent_s=1.5)
    yield lines
    lines.close()


@pytest.fixture
def process(lifelines):
    """A process that holds a lifeline as w1."""
    anchor = lifelines.anchor("127.0.0.1")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(anchor.port), anchor.token], stderr=subprocess.PIPE, text=True
    )
    yield holder
    holder.kill()
    holder.communicate()


def hold(lifelines, id="w1"):
    """Returns an event that is set when the line is cut."""
    cut = threading.Event()
    Lifeline.hold(lifelines.anchor("127.0.0.1"), id, "node", "10.0.0.1", lambda reason: cut.set())
    return cut


def greet(anchor, id, token=None):
    """A connection that says who it is, and then nothing."""
    connection = socket.create_connection((anchor.host, anchor.port))
    connection.sendall(Greeting(token or anchor.token, id, 7, "node", "10.0.0.1").encode())
    return connection


def is_closed(connection):
    connection.settimeout(DEADLINE_S)
    return connection.recv(1) == b""


def test_a_worker_arrives_and_is_gone_as_soon_as_it_is_killed(told, process):
    assert told.next() == Arrived("w1", process.pid, "node", "127.0.0.1")
    process.kill()
    assert told.next() == Cut("w1")


def test_a_frozen_worker_is_silent_and_may_be_heard_again(told, process):
    told.next()
    os.kill(process.pid, signal.SIGSTOP)
    silent = told.next()
    assert isinstance(silent, Silent)
    assert (silent.id, silent.seconds >= 1.5) == ("w1", True)
    os.kill(process.pid, signal.SIGCONT)
    assert told.next() == Heard("w1")


def test_a_worker_that_is_cut_ends_itself_even_if_it_was_frozen(told, lifelines, process):
    told.next()
    os.kill(process.pid, signal.SIGSTOP)
    lifelines.cut("w1")
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "the controller closed the lifeline" in said
    while not told.nothing_more():
        assert isinstance(told.next(), Silent | Heard), "who was cut is not told of as gone"


def test_without_a_controller_no_worker_lives_on(told, lifelines):
    cuts = [hold(lifelines, id) for id in ("w1", "w2")]
    assert {told.next().id, told.next().id} == {"w1", "w2"}
    lifelines.close()
    assert all(cut.wait(DEADLINE_S) for cut in cuts)


def test_a_worker_given_up_before_it_came_is_sent_away(told, lifelines):
    lifelines.cut("w1")
    assert hold(lifelines).wait(DEADLINE_S)
    hold(lifelines, "w2")
    assert told.next().id == "w2"


def test_only_workers_of_this_attempt_are_let_in(told, lifelines):
    anchor = lifelines.anchor("127.0.0.1")
    assert is_closed(greet(anchor, "w1", token="another attempt's"))
    stranger = socket.create_connection((anchor.host, anchor.port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert is_closed(stranger)
    talker = socket.create_connection((anchor.host, anchor.port))
    talker.sendall(b"x" * 5000)
    assert is_closed(talker)
    first = greet(anchor, "w1")
    assert told.next().id == "w1"
    assert is_closed(greet(anchor, "w1")), "its name is taken"
    first.close()
    assert told.next() == Cut("w1")
    assert told.nothing_more()


def test_an_address_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"w1 on 10\.0\.0\.1 .* controller at 127\.0\.0\.1:{port}"):
        Lifeline.hold(Anchor("127.0.0.1", port, "", 0.1), "w1", "node", "10.0.0.1", print)


def test_nobody_is_called_silent_because_the_controller_slept(told):
    """Its clock jumps over the time of silence while it does not look."""
    now = [0.0]
    lines = Lifelines(told.queue.put, beat_s=0.05, silent_s=1.5, clock=lambda: now[0])
    try:
        quiet = greet(lines.anchor("127.0.0.1"), "w1")
        assert told.next().id == "w1"
        now[0] = 100.0
        hold(lines, "w2")
        assert told.next().id == "w2"
        assert told.nothing_more()
        now[0] += 0.9
        hold(lines, "w3")
        assert told.next().id == "w3"
        now[0] += 0.9
        silent = told.next()
        assert isinstance(silent, Silent)
        assert silent.id == "w1"
        quiet.close()
    finally:
        lines.close()


def test_a_watch_that_fails_stops_the_run_by_name(told):
    def fail():
        raise OSError("no buffer space available")

    lines = Lifelines(told.queue.put, beat_s=0.05, silent_s=1.5, clock=fail)
    reason = "the workers can be watched no longer: OSError: no buffer space available"
    assert told.next() == StopRequested(reason, 75)
    lines.close()


def test_the_end_comes_at_any_moment(told):
    """Also while the thread has just come round by itself."""
    for _ in range(200):
        lines = Lifelines(told.queue.put, beat_s=0.05, silent_s=1.5)
        lines.cut("w1")
        lines.close()
        lines.close()
        lines.cut("w2")
