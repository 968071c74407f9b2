"""A worker's code or process stands still: who and where is said, and the others go on without it."""

from __future__ import annotations

import os
import signal

import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster


def hang(run):
    """The diagnosis, of the only hang there was."""
    run.until(lambda: run.events("hang"), "a diagnosis")
    [event] = run.events("hang")
    return event["reason"]


def test_a_frozen_worker_and_one_in_an_endless_loop_are_named_and_replaced(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=3, failure__hang_s=4).start()
    frozen = run.members[1]
    run.more(steps=1).lose({frozen})
    os.kill(frozen, signal.SIGSTOP)
    run.more(steps=3)
    assert "rank 1" in hang(run)
    assert "wait in all_to_all" in hang(run)
    run.grow()
    step, looping = run.status["step"] + 2, run.members[2]
    (run.folder / "fault").write_text(f"loop {step} {looping}")
    run.lose({looping}).open(step + 2)
    run.until(lambda: len(run.events("hang")) == 2, "another diagnosis")
    reason = run.events("hang")[1]["reason"]
    assert "rank 2" in reason
    assert "tiny.py:" in reason
    assert "in loop" in reason
    run.at(step + 2).grow().finish()
    assert run.line == undisturbed(EVERYTHING)
    assert len(run.events("worker_lost")) == 2


def test_a_rank_that_skips_a_collective_of_the_task_is_named(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=3, task__class="tiny:Peering", failure__hang_s=4)
    (run.folder / "fault").write_text("skip 6 1")
    run.start().open(10)
    assert "rank 1" in hang(run)
    assert "two" in hang(run)
    run.at(10).finish()
    assert run.line == undisturbed(EVERYTHING)


def test_two_collectives_in_swapped_order_are_an_error_and_no_exchange(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=3, task__class="tiny:Peering")
    (run.folder / "fault").write_text("swap 6 1")
    run.start().at(8)
    (error, *_) = run.events("task_error")
    assert "CollectiveMismatch" in error["reason"]
    assert "rank 1" in error["reason"]
    run.finish()
    assert run.line == undisturbed(EVERYTHING)
