"""Ranks that did not meet: who has not come, and who cannot be reached, are named."""

import socket
import threading
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from worldline.collective import forming
from worldline.collective.group import CollectiveFailed
from worldline.collective.reach import Door, unreachable

FOREIGN = "203.0.113.1"
"""RFC 5737: no node's own."""


@pytest.fixture
def deaf():
    """A port that lets whoever knocks wait: its queue is full, and nobody takes from it."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as stack:
        for _ in range(3):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(listener.getsockname())
        yield listener.getsockname()[:2]


def open_port():
    return socket.create_server(("127.0.0.1", 0))


def closed_port():
    with open_port() as listener:
        return listener.getsockname()[:2]


def test_an_open_door_and_one_that_was_shut_answer():
    with open_port() as listener:
        assert unreachable({0: listener.getsockname()[:2], 1: closed_port()}, 5) == {}


def test_who_does_not_answer_is_found_beside_who_does(deaf):
    with open_port() as listener:
        silent = unreachable({0: listener.getsockname()[:2], 1: deaf, 2: ("255.255.255.255", 9)}, 0.2)
    assert silent == {1: "no answer in 0.2 s", 2: "ENETUNREACH"}


def test_the_complaint_names_ranks_and_addresses(tmp_path, deaf):
    store = PrefixStore("meeting", dist.FileStore(str(tmp_path / "store"), -1))
    doors = [Door(rank, 4, "127.0.0.1") for rank in range(4)]
    doors[0].announce(store)
    doors[1].announce(store)
    assert doors[0].complaint(store) == "ranks 2, 3 did not come"
    doors[2].announce(store)
    doors[3].announce(store)
    assert doors[0].complaint(store) == ""
    store.set("door/2", f"127.0.0.1 {deaf[1]}")
    for door in doors:
        door.close()
    complaint = "rank 1 at 127.0.0.1 cannot reach rank 2 at 127.0.0.1: no answer in 2 s"
    assert doors[1].complaint(store) == complaint, "a door that was shut is not far"


def test_who_cannot_be_reached_is_named_long_before_forming_gives_up(monkeypatch, deaf):
    monkeypatch.setattr(forming, "LOOK_S", 0.1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    PrefixStore("meeting", store).set("door/1", f"127.0.0.1 {deaf[1]}")
    over = threading.Event()
    try:
        with pytest.raises(CollectiveFailed) as raised:
            forming.meet(
                store,
                lambda _: over.wait(),
                range(1),
                prefix="meeting",
                rank=0,
                size=2,
                address="127.0.0.1",
                form_timeout_s=600,
                cancelled=lambda: False,
            )
    finally:
        over.set()
    who = "rank 0 at 127.0.0.1 cannot reach rank 1 at 127.0.0.1: no answer in 2 s"
    assert str(raised.value) == f"forming meeting: the 2 ranks do not meet; {who}"


def test_an_address_that_is_not_this_nodes_is_left_to_forming_to_tell():
    door = Door(0, 2, FOREIGN)
    door.announce(None)
    door.close()
