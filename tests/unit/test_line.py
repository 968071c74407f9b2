"""The step log gets each step once, in order, however the reports come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldline.control.line import Line
from worldline.events import StepRecord
from worldline.tracking.log import STEPS, StepLog, read_steps


def record(step, generation=1):
    return StepRecord(
        step=step,
        epoch=0,
        loss=1.0 / step,
        lr=0.1,
        grad_norm=1.0,
        rows=8,
        world=1,
        generation=generation,
        attempt=1,
        step_s=0.1,
        data_s=0.0,
        compute_s=0.1,
        reduce_s=0.0,
        state_digest=None,
        rows_digest="",
        time=0.0,
    )


@pytest.fixture
def written(tmp_path):
    return lambda: [(r["step"], r["generation"]) for r in read_steps(tmp_path / STEPS)]


@pytest.fixture
def line(tmp_path):
    log = StepLog(tmp_path / STEPS)
    yield Line(log)
    log.close()


def test_a_gap_is_kept_until_it_is_filled(line, written):
    assert [r.step for r in line.offer([record(1), record(2)])] == [1, 2]
    assert line.offer([record(4), record(5)]) == []
    assert line.lacks(0)
    assert (line.last_step, line.newest) == (2, 5)
    assert [r.step for r in line.offer([record(3)])] == [3, 4, 5]
    assert not line.lacks(0)
    assert [step for step, _ in written()] == [1, 2, 3, 4, 5]


def test_what_it_lacks_of_what_is_known_to_be_completed(line):
    line.offer([record(1)])
    assert not line.lacks(1)
    assert line.lacks(2)


def test_after_a_rewind_old_generations_cannot_write(line, written):
    line.offer([record(step) for step in range(1, 8)])
    line.rewind(4, generation=1)
    assert line.last_step == 4
    assert line.offer([record(5, 1), record(6, 1)]) == []
    assert [r.step for r in line.offer([record(5, 2)])] == [5]
    assert written() == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]


def test_a_rewind_keeps_what_old_generations_did_before_it(line, written):
    line.offer([record(1), record(3), record(5)])
    line.rewind(4, generation=1)
    line.offer([record(5, 2)])
    line.offer([record(2, 1), record(4, 1)])
    assert written() == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]


def test_a_gap_that_nobody_can_fill_is_passed_over(line, written):
    line.offer([record(1), record(4), record(7)])
    assert line.pass_over(0) == (2, 3)
    line.offer([])
    assert line.pass_over(0) == (5, 6)
    line.offer([])
    assert not line.lacks(0)
    assert line.pass_over(9) == (8, 9)
    assert line.last_step == 9
    assert [step for step, _ in written()] == [1, 4, 7]


@settings(deadline=None)  # it writes files
@given(st.data())
def test_any_order_and_any_repetition(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("line")
    log = StepLog(folder / STEPS)
    line = Line(log)
    total = data.draw(st.integers(1, 12))
    steps = data.draw(st.permutations(list(range(1, total + 1)) * 2))
    returned = []
    while steps:
        cut = data.draw(st.integers(1, len(steps)))
        returned += line.offer([record(step) for step in steps[:cut]])
        steps = steps[cut:]
    log.close()
    assert [r.step for r in returned] == list(range(1, total + 1))
    assert [r["step"] for r in read_steps(folder / STEPS)] == list(range(1, total + 1))
