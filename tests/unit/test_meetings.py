"""Groups formed ahead of their generation: each is used once or given up, whatever comes in between."""

import queue
import threading

import pytest

from worldline.collective.group import CollectiveFailed
from worldline.worker.meetings import Meetings
from worldline.worker.orders import Meeting, Met

DEADLINE_S = 10.0


class Group:
    def __init__(self, meeting):
        self.meeting = meeting
        self.left = threading.Event()

    def abandon(self):
        self.left.set()


class Bench:
    """Meetings whose members come when the test lets them."""

    def __init__(self):
        self.told = queue.Queue()
        self.formed = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error = ""
        self.meetings = Meetings(self.form, lambda generation: False, self.told.put)

    def form(self, meeting, cancelled):
        assert self.gate.wait(DEADLINE_S)
        if self.error:
            raise CollectiveFailed(self.error)
        self.formed[meeting] = group = Group(meeting)
        return group

    def met(self, meeting):
        self.meetings.begin(meeting)
        assert self.told.get(timeout=DEADLINE_S) == Met(meeting.generation, meeting.number)
        return self.formed[meeting]

    def enter(self, meeting):
        return self.meetings.enter(meeting, lambda: False)


@pytest.fixture
def bench():
    return Bench()


def meeting(generation, number):
    return Meeting(generation, number, rank=0, size=2)


def test_the_generation_gets_the_group_that_met_for_it_once(bench):
    group = bench.met(meeting(2, 1))
    assert bench.enter(meeting(2, 1)) is group
    assert not group.left.is_set()
    with pytest.raises(CollectiveFailed, match="was not at the meeting generation-2-1"):
        bench.enter(meeting(2, 1))


def test_without_a_meeting_it_is_formed_and_what_met_in_vain_is_left(bench):
    old, other, next_one = bench.met(meeting(2, 1)), bench.met(meeting(3, 1)), bench.met(meeting(4, 1))
    group = bench.enter(meeting(3, 0))
    assert group.meeting == meeting(3, 0)
    assert (old.left.is_set(), other.left.is_set(), next_one.left.is_set()) == (True, True, False)
    assert bench.enter(meeting(4, 1)) is next_one


def test_who_meets_too_late_leaves_at_once(bench):
    bench.gate.clear()
    bench.meetings.begin(meeting(2, 1))
    entering = threading.Thread(target=bench.enter, args=(meeting(2, 0),))
    entering.start()
    bench.gate.set()
    entering.join(DEADLINE_S)
    bench.enter(meeting(3, 0))
    for _ in range(1000):
        if meeting(2, 1) in bench.formed:
            break
        threading.Event().wait(0.01)
    assert bench.formed[meeting(2, 1)].left.wait(DEADLINE_S)


def test_a_meeting_that_fails_is_told(bench):
    bench.error = "a peer did not come"
    bench.meetings.begin(meeting(2, 1))
    assert bench.told.get(timeout=DEADLINE_S) == Met(2, 1, "a peer did not come")
