"""When a run gives up: errors of the job are counted, losses only without progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.control.budget import Budget, start_delay
from worldline.worker.orders import EndKind, GenerationEnd
from worldline.world import Position

LOST = "rank 1 is gone"


def end(kind, generation=1, reason="ValueError: bad row"):
    return GenerationEnd(kind, generation, Position(4), reason)


@pytest.mark.parametrize("kind", [EndKind.FINISHED, EndKind.HALTED, EndKind.BROKEN])
def test_what_is_nobodys_fault_is_free(kind):
    budget = Budget(1, 1)
    for generation in range(100):
        budget = budget.after_end(end(kind, generation), 0)
    assert budget == Budget(1, 1)


@pytest.mark.parametrize(
    "kind", [EndKind.NONFINITE, EndKind.DATA_ERROR, EndKind.DISAGREED, EndKind.RESTORE_FAILED]
)
def test_what_would_come_again_ends_the_run_at_once(kind):
    assert "bad row" in Budget(5, 5).after_end(end(kind), 2).verdict


def test_task_errors_are_counted_over_the_attempt():
    budget = Budget(max_task_errors=2, max_no_progress=1)
    budget = budget.after_end(end(EndKind.TASK_ERROR, 1), 0)
    assert not budget.verdict
    budget = budget.after_generation(50, trouble=LOST).after_generation(90, trouble="")
    budget = budget.after_end(end(EndKind.TASK_ERROR, 3), 1)
    assert budget.verdict == "the task's code raised 2 times, last on rank 1: ValueError: bad row"


def test_what_all_ranks_raise_alike_counts_once():
    budget = Budget(max_task_errors=2, max_no_progress=1)
    for rank in range(4):
        budget = budget.after_end(end(EndKind.TASK_ERROR, 1), rank)
    assert budget.task_errors == 1
    assert not budget.verdict


def test_once_if_once_is_the_limit():
    verdict = Budget(1, 1).after_end(end(EndKind.TASK_ERROR), 0).verdict
    assert verdict == "the task's code raised once, last on rank 0: ValueError: bad row"


def test_a_worker_that_cannot_be_prepared():
    assert Budget(3, 3).after_start_error("no module jobs").verdict == (
        "a worker could not be prepared: no module jobs"
    )


def test_the_first_verdict_stays():
    budget = Budget(1, 1).after_start_error("first")
    assert budget.after_start_error("second") is budget
    assert budget.after_end(end(EndKind.NONFINITE), 0) is budget
    assert budget.after_generation(0, trouble=LOST) is budget


def test_generations_that_break_without_a_step():
    budget = Budget(3, max_no_progress=3, last_step=50)
    for _ in range(2):
        budget = budget.after_generation(50, trouble=LOST)
        assert not budget.verdict
    assert budget.after_generation(50, trouble=LOST).verdict == (
        "3 generations in a row completed no step beyond 50; last: rank 1 is gone"
    )


@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60),
    st.integers(1, 5),
)
def test_no_verdict_without_that_many_fruitless_generations_in_a_row(history, limit):
    budget = Budget(1, limit)
    best, fruitless = 0, 0
    for step, broken in history:
        budget = budget.after_generation(step, LOST if broken else "")
        fruitless = fruitless + 1 if broken and step <= best else 0
        best = max(best, step)
        if fruitless >= limit:
            assert budget.verdict
            return
        assert not budget.verdict


def test_the_delay_before_the_next_request_grows_to_a_minute():
    delays = [start_delay(failures) for failures in range(1, 100)]
    assert delays == sorted(delays)
    assert delays[0] == 2
    assert delays[-1] == 60
