"""Groups that can be left at any moment: by death, silence, order or deadline, and a new one beside them."""

import os
import select
import signal
import threading
import time
import weakref
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.unit.ranks import DEADLINE_S, another, everywhere, form, new_prefix, peers, stop_self, until

from worldline.collective.forming import connect_ahead, form_gloo
from worldline.collective.group import LANES, Abandoned, CollectiveFailed


def enter(room, rank, size, prefix, timeout_s=DEADLINE_S):
    room.leave = threading.Event()
    room.group = form(room, rank, size, prefix, cancelled=room.leave.is_set, timeout_s=timeout_s)


def exchange(room, elements=4, lane=0, label="numbers"):
    """Each rank gets [sender] * elements from everyone."""
    group = room.group
    incoming = torch.empty(group.size * elements)
    outgoing = torch.full((group.size * elements,), float(group.rank))
    cuts = [elements] * group.size
    group.wait(group.all_to_all(incoming, outgoing, cuts, cuts, lane=lane, label=label))
    return incoming[::elements].tolist()


def exchange_until_broken(room):
    """How it ended, and after how long."""
    began = time.monotonic()
    while True:
        try:
            began = time.monotonic()
            exchange(room, 1000)
        except (CollectiveFailed, Abandoned) as error:
            room.group.abandon()
            return type(error).__name__, str(error), time.monotonic() - began


def fail(room):
    """Exchange, and stay in the group that is broken by it."""
    try:
        exchange(room, 1_000_000)
    except CollectiveFailed:
        return


def busy(room):
    """The loops that have something to do whenever they are asked."""

    def has_news(loop):
        with closing(select.epoll.fromfd(os.dup(loop))) as epoll:
            return bool(epoll.poll(0))

    return [loop for loop in room.group.loops if all(has_news(loop) for _ in range(50))]


def abandon(room):
    room.group.abandon()


def freeze(room):
    stop_self()


def enter_and_exchange(room, rank, size, prefix):
    enter(room, rank, size, prefix)
    return [exchange(room, lane=lane) for lane in (0, 1)]


def leave(room):
    room.leave.set()


def fail_to_form(room, size, prefix, form_timeout_s):
    room.leave = threading.Event()
    try:
        form(room, 0, size, prefix, cancelled=room.leave.is_set, form_timeout_s=form_timeout_s)
    except (CollectiveFailed, Abandoned) as error:
        return type(error).__name__, str(error)


def unequal(room):
    """Rank r sends r + 1 numbers to rank 0 and one to each other; and the sum over ranks in place."""
    group = room.group
    sends = [group.rank + 1] + [1] * (group.size - 1)
    receives = [r + 1 if group.rank == 0 else 1 for r in range(group.size)]
    incoming = torch.empty(sum(receives))
    outgoing = torch.full((sum(sends),), float(group.rank))
    group.wait(group.all_to_all(incoming, outgoing, receives, sends, lane=1, label="unequal"))
    total = torch.tensor([1.0, group.rank])
    group.wait(group.all_reduce(total, lane=0, label="sum"))
    return incoming.tolist(), total.tolist()


def memory_after_abandon(room):
    """Whether the tensors of an unfinished operation outlive the group's abandonment; those of a finished one
    must not.
    """
    refs = []
    for wait in (True, False):
        tensors = torch.empty(room.group.size), torch.zeros(room.group.size)
        ones = [1] * room.group.size
        pending = room.group.all_to_all(*tensors, ones, ones, lane=0, label="numbers")
        refs.append([weakref.ref(tensor) for tensor in tensors])
        if wait:
            room.group.wait(pending)
    del tensors, pending
    room.group.abandon()
    until(lambda: not any(ref() is not None for ref in refs[0]))  # the backend's thread lets go of them last
    return [ref() is not None for ref in refs[1]]


def memory_after_wait(room):
    """Whether the group still holds what was exchanged."""
    tensors = torch.empty(room.group.size), torch.zeros(room.group.size)
    refs = [weakref.ref(tensor) for tensor in tensors]
    ones = [1] * room.group.size
    pending = room.group.all_to_all(*tensors, ones, ones, lane=0, label="numbers")
    room.group.wait(pending)
    del tensors, pending
    until(lambda: not any(ref() is not None for ref in refs))


def test_what_was_exchanged_is_let_go_of():
    with peers(2) as ranks:
        everywhere(ranks, enter)
        for rank in ranks:
            rank.start(memory_after_wait)
        for rank in ranks:
            rank.result()


def test_bytes_go_where_they_should():
    with peers(4) as ranks:
        assert everywhere(ranks, enter_and_exchange) == [[[0, 1, 2, 3]] * 2] * 4
        for rank in ranks:
            rank.start(unequal)
        results = [rank.result() for rank in ranks]
    assert results[0][0] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert all(received == [0, 1, 2, 3] for received, _ in results[1:])
    assert all(total == [4, 6] for _, total in results)


def test_every_rank_sees_a_death_and_a_new_group_goes_on():
    with peers(4) as ranks:
        everywhere(ranks, enter)
        survivors = [ranks[0], ranks[1], ranks[3]]
        for survivor in survivors:
            survivor.start(exchange_until_broken)
        ranks[2].kill()
        for survivor in survivors:
            kind, message, waited = survivor.result()
            assert kind == "CollectiveFailed"
            assert message.startswith("all_to_all numbers: ")
            assert waited < DEADLINE_S / 6  # the operation itself would have waited for DEADLINE_S
        newcomer = another(ranks)
        assert everywhere([*survivors, newcomer], enter_and_exchange) == [[[0, 1, 2, 3]] * 2] * 4


def test_a_group_that_was_left_takes_no_processor():
    """A peer that asks for what a failed operation had to give keeps gloo's loop busy for ever."""
    with peers(4) as ranks:
        everywhere(ranks, enter)
        ranks[0].start(fail)
        ranks[2].start(fail)
        ranks[3].kill()
        ranks[0].result()
        ranks[2].result()
        ranks[1].call(fail)
        until(lambda: ranks[0].call(busy))
        for survivor in ranks[:3]:
            survivor.call(abandon)
        assert [survivor.call(busy) for survivor in ranks[:3]] == [[], [], []]
        assert everywhere(ranks[:3], enter_and_exchange) == [[[0, 1, 2]] * 2] * 3


def test_a_frozen_peer_is_left_on_order_and_disturbs_nobody_when_it_wakes():
    with peers(3) as ranks:
        everywhere(ranks, enter)
        ranks[1].start(freeze)
        ranks[1].wait_stopped()
        survivors = [ranks[0], ranks[2]]
        for survivor in survivors:
            survivor.start(exchange_until_broken)
        for survivor in survivors:
            survivor.now(leave)
            kind, message, _ = survivor.result()
            assert (kind, message) == ("Abandoned", "gave up waiting in all_to_all numbers on order")
        assert everywhere(survivors, enter_and_exchange) == [[[0, 1]] * 2] * 2
        os.kill(ranks[1].pid, signal.SIGCONT)
        ranks[1].result()
        ranks[1].start(exchange_until_broken)  # in the group the others left
        for survivor in survivors:
            survivor.start(exchange)
        assert [survivor.result() for survivor in survivors] == [[0, 1]] * 2


def test_a_silent_peer_ends_the_wait_at_its_deadline_and_the_message_says_so():
    with peers(2) as ranks:
        everywhere(ranks, enter, 0.2)
        kind, message, _ = ranks[0].call(exchange_until_broken)
    assert kind == "CollectiveFailed"
    # The backend's own deadline is the same and may come first.
    assert message == "all_to_all numbers: no answer from a peer in 0.2 s" or "imed out" in message


def test_forming_ends_on_order_or_at_its_deadline_when_a_peer_never_comes():
    with peers(2) as ranks:
        prefix = new_prefix()
        kind, message = ranks[0].call(fail_to_form, 2, prefix, 0.2)
        assert kind == "CollectiveFailed"
        assert message == f"forming {prefix}: the 2 ranks did not meet in 0.2 s; rank 1 did not come"
        prefix = new_prefix()
        ranks[0].start(fail_to_form, 2, prefix, DEADLINE_S)
        assert not ranks[0].answered(0.05)
        ranks[0].now(leave)
        assert ranks[0].result() == ("Abandoned", f"gave up forming {prefix} on order")
        assert everywhere(ranks, enter_and_exchange) == [[[0, 1]] * 2] * 2


def test_an_abandoned_group_keeps_what_it_may_still_write_to_and_no_more():
    with peers(2) as ranks:
        everywhere(ranks, enter)
        ranks[1].start(exchange, 1)
        assert ranks[0].call(memory_after_abandon) == [True, True]
        ranks[1].result()


class CountingStore:
    """A store that counts the connections made to it."""

    def __init__(self, store):
        self.store = store
        self.connections = 0

    def clone(self):
        self.connections += 1
        return self.store.clone()


def test_connections_to_the_store_are_made_ahead_and_used_again(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
    stores = [CountingStore(client), CountingStore(client)]
    for store in stores:
        connect_ahead(store)
    for number in range(3):
        groups = {}

        def enter_as(rank, groups=groups, number=number):
            groups[rank] = form_gloo(
                stores[rank],
                prefix=f"test-{number}",
                rank=rank,
                size=2,
                address="127.0.0.1",
                form_timeout_s=DEADLINE_S,
                timeout_s=DEADLINE_S,
                cancelled=lambda: False,
            )

        threads = [threading.Thread(target=enter_as, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(groups) == 2
    assert [store.connections for store in stores] == [2 * LANES] * 2
