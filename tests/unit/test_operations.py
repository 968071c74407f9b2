"""What a rank entered can be read at any time, while it waits and after it is done."""

import threading

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ranks import everywhere, peers, until
from tests.unit.test_group import enter, exchange

from worldline.collective.operations import KEPT, Operation, OperationLog

CALLS = st.tuples(st.integers(0, 2), st.sampled_from(["words", "bucket 1"]), st.integers(0, 1 << 40))


@given(st.lists(CALLS))
def test_the_newest_of_each_lane_are_remembered_in_their_order(entered):
    log = OperationLog(3)
    expected = {lane: [] for lane in range(3)}
    for lane, label, num_bytes in entered:
        operation = log.enter(lane, "all_to_all", label, num_bytes)
        assert operation == (lane, len(expected[lane]), "all_to_all", label, num_bytes)
        expected[lane].append(operation)
    assert log.entered() == tuple(op for lane in expected.values() for op in lane[-KEPT:])
    assert log.waiting is None


def test_it_is_whole_whenever_another_thread_reads():
    log, stop = OperationLog(2), threading.Event()

    def write():
        while not stop.is_set():
            log.enter(0, "all_to_all", "numbers", 4)
            log.enter(1, "all_to_all", "numbers", 4)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until(lambda: len(log.entered()) == 2 * KEPT)
        for _ in range(2000):
            for lane in range(2):
                seen = [op.sequence for op in log.entered() if op.lane == lane]
                assert len(seen) == KEPT
                assert len(set(seen)) == KEPT
    finally:
        stop.set()
        writer.join()


def waiting(room):
    """What this rank waits in, what it entered and what of it is under way."""
    until(lambda: room.group.log.waiting is not None)
    return room.group.log.waiting[0], room.group.log.entered(), room.group.unfinished()


def seen(room):
    return room.group.log.waiting, room.group.log.entered(), room.group.unfinished()


def test_a_wait_says_in_which_operation():
    with peers(2) as ranks:
        everywhere(ranks, enter)
        first = Operation(0, 0, "all_to_all", "first", 2 * 4 * 4)
        second = Operation(0, 1, "all_to_all", "second", 2 * 100 * 4)
        other = Operation(1, 0, "all_to_all", "other lane", 2 * 4 * 4)
        for label, elements, lane in (("first", 4, 0), ("other lane", 4, 1)):
            for rank in ranks:
                rank.start(exchange, elements, lane, label)
            for rank in ranks:
                rank.result()
        ranks[0].start(exchange, 100, 0, "second")
        assert ranks[0].now(waiting) == (second, (first, second, other), (second,))
        assert ranks[1].now(seen) == (None, (first, other), ())
        ranks[1].start(exchange, 100, 0, "second")
        for rank in ranks:
            rank.result()
            assert rank.now(seen) == (None, (first, second, other), ())
