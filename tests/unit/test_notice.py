"""SIGTERM is told on, and ends the process in the end."""

import os
import queue
import signal
import threading

import pytest

from worldline.worker.notice import LEAD_S, Notices
from worldline.worker.orders import Notice

TOLD = Notice("SIGTERM", LEAD_S)


class Heard:
    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self.ended = threading.Event()

    def tell(self, notice: Notice) -> bool:
        self.notices.put(notice)
        return self.answers


@pytest.fixture
def take():
    made = []

    def make(heard, **times) -> None:
        made.append(Notices(heard.tell, heard.ended.set, **times))

    yield make
    for notices in made:
        notices.close()


def send(pid: int | None = None) -> None:
    os.kill(pid or os.getpid(), signal.SIGTERM)


def test_the_first_is_told_and_the_process_ends_when_its_time_is_over(take):
    heard = Heard()
    take(heard, stay_s=0.2)
    send()
    assert heard.notices.get(timeout=20) == TOLD
    assert heard.ended.wait(20)
    assert heard.notices.empty()


def test_the_second_ends_the_process(take):
    heard = Heard()
    take(heard, stay_s=1000, echo_s=0)
    send()
    heard.notices.get(timeout=20)
    assert not heard.ended.is_set()
    send()
    assert heard.ended.wait(20)


def test_an_echo_of_the_first_is_none(take):
    heard = Heard()
    take(heard, stay_s=0.5, echo_s=1000)
    send()
    heard.notices.get(timeout=20)
    send()
    assert not heard.ended.wait(0.1)
    assert heard.ended.wait(20)
    assert heard.notices.empty()


def test_with_nobody_to_tell_the_process_ends_at_once(take):
    heard = Heard(answers=False)
    take(heard, stay_s=1000)
    send()
    assert heard.ended.wait(20)


def test_a_forked_process_dies_of_it(take):
    heard = Heard()
    take(heard, stay_s=1000)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        os.write(told, b"1")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    send(child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(ready)
    os.close(told)
    assert heard.notices.empty()


def test_what_handled_it_before_does_so_afterwards():
    heard, before = Heard(), signal.getsignal(signal.SIGTERM)
    notices = Notices(heard.tell, heard.ended.set)
    assert signal.getsignal(signal.SIGTERM) != before
    notices.close()
    assert signal.getsignal(signal.SIGTERM) is before
