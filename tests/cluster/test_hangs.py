"""A worker's process or code stands still: who and where is said, and the others go on without it."""

from __future__ import annotations

import os
import signal

import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster


def hang(run):
    """The diagnosis of the only hang there was."""
    run.until(lambda: run.events("hang"), "a diagnosis", or_ended=True)
    [event] = run.events("hang")
    return event["reason"]


@pytest.fixture
def hanging(scenario):
    """A run of three that begins whole, so that its first steps take no longer than the others, and hangs."""

    def begin(fault, **settings):
        run = scenario(EVERYTHING, workers=3, world__min=3, failure__hang_s=4, **settings)
        (run.folder / "fault").write_text(fault)
        return run.start().open()

    return begin


@pytest.mark.parametrize("rank", [0, 2])
def test_a_frozen_worker_is_named_and_replaced(scenario, undisturbed, rank) -> None:
    run = scenario(EVERYTHING, workers=3).start()
    frozen = run.members[rank]
    run.more(steps=1).lose({frozen})
    os.kill(frozen, signal.SIGSTOP)
    run.more(steps=3)
    assert f"rank {rank}" in hang(run)
    assert "wait in all_to_all" in hang(run)
    run.grow().finish()
    assert run.line == undisturbed(EVERYTHING)
    assert len(run.events("worker_lost")) == 1


def test_an_endless_loop_is_named_with_its_line_and_its_worker_replaced(hanging, undisturbed) -> None:
    run = hanging("loop 7")
    assert "tiny.py:" in hang(run)
    assert "in loop" in hang(run)
    run.finish()
    assert run.line == undisturbed(EVERYTHING)
    assert len(run.events("worker_lost")) == 1


def test_who_skips_a_collective_of_the_task_is_named(hanging, undisturbed) -> None:
    run = hanging("skip 6 1", task__class="tiny:Peering")
    assert "rank 1" in hang(run)
    assert "two" in hang(run)
    run.finish()
    assert run.line == undisturbed(EVERYTHING)


def test_two_collectives_in_swapped_order_are_an_error_and_no_exchange(hanging, undisturbed) -> None:
    run = hanging("swap 6 1", task__class="tiny:Peering")
    run.finish()
    error, *_ = run.events("task_error")
    assert "CollectiveMismatch" in error["reason"]
    assert "rank 1" in error["reason"]
    assert run.line == undisturbed(EVERYTHING)
