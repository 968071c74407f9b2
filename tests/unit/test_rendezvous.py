"""The store where generations meet keeps what the newest one needs, and no more."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.unit.ranks import DEADLINE_S, until

from worldline.collective.forming import connect_ahead, form_gloo
from worldline.control.rendezvous import Rendezvous
from worldline.worker.orders import Meeting


@pytest.mark.parametrize(
    "key", ["generation-12-0/lane0/1", "/generation-12-0/lane0/1", "generation-12-3/door/1"]
)
def test_a_key_says_which_generation_met_there(key):
    assert Meeting.generation_of(key) == 12


@pytest.mark.parametrize("key", ["other/generation-12-0", "generation-x-0/1", "generation", "init/"])
def test_other_keys_are_of_none(key):
    assert Meeting.generation_of(key) is None


def test_a_meetings_own_prefix_is_understood():
    assert Meeting.generation_of(f"{Meeting(7, 2, 0, 3).prefix}/lane1/0") == 7


def meet(store, generation, number=0):
    """Two ranks form a group."""

    def enter(rank):
        form_gloo(
            store,
            prefix=Meeting(generation, number, rank, 2).prefix,
            rank=rank,
            size=2,
            address="127.0.0.1",
            form_timeout_s=DEADLINE_S,
            timeout_s=DEADLINE_S,
            cancelled=lambda: False,
        ).abandon()

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def generations(store):
    return {Meeting.generation_of(key) for key in store.list_keys()} - {None}


def test_the_store_does_not_grow_with_the_number_of_changes():
    rendezvous = Rendezvous()
    store = dist.TCPStore("127.0.0.1", rendezvous.port, is_master=False, timeout=timedelta(seconds=30))
    connect_ahead(store)
    store.set("another's", "kept")
    meet(store, 1)
    num_keys = store.num_keys()
    assert num_keys > 4
    for generation in range(2, 6):
        meet(store, generation)
        rendezvous.forget_before(generation)
        until(lambda newest=generation: generations(store) == {newest})
        assert store.num_keys() == num_keys
    meet(store, 7, number=1)  # one that is still to come
    rendezvous.forget_before(6)
    until(lambda: generations(store) == {7})
    assert store.get("another's") == b"kept"
