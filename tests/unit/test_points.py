"""From log lines to curves, and from log files to batches."""

import math
from dataclasses import replace

import pytest

from worldline.events import EvaluationRecord, Event, EventKind, StepRecord
from worldline.tracking.incidents import incidents
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, EvaluationLog, EventLog, StepLog
from worldline.tracking.points import Points, metric_name
from worldline.tracking.spool import Spool

RECORD = StepRecord(
    step=0, epoch=0, loss=0.5, lr=0.1, grad_norm=0.3, rows=32, world=2, generation=1, attempt=1, step_s=0.05,
    data_s=0.001, compute_s=0.04, reduce_s=0.005, state_digest=None, rows_digest="ab", time=1.7e9,
)  # fmt: skip


def line(step, **changes):
    return replace(RECORD, step=step, **changes).__dict__


def event(kind, step, seconds=None, time=0.0):
    return Event(time, kind, 1, step, 2, 1, seconds=seconds)


def values(points, key):
    return {point.step: point.value for point in points if point.key == key}


def test_a_step_s_curves():
    points = Points().step(line(7, metrics={"accuracy": 0.5, "loss": 9.0}))
    assert {p.key: p.value for p in points} == {
        "loss": 0.5, "lr": 0.1, "grad_norm": 0.3, "step_s": 0.05, "data_s": 0.001, "compute_s": 0.04,
        "reduce_s": 0.005, "world": 2.0, "generation": 1.0, "rows_per_s": 640.0, "accuracy": 0.5,
        "task_loss": 9.0,
    }  # fmt: skip
    assert {(p.step, p.time_ms) for p in points} == {(7, 1_700_000_000_000)}


def test_what_is_not_finite_is_left_out_and_counted():
    source = Points()
    points = source.step(line(4)) + source.step(line(5, loss=math.nan, grad_norm=math.inf))
    points += source.step(line(6, metrics={"a": -math.inf})) + source.step(line(7))
    assert set(values(points, "loss")) == {4, 6, 7}
    assert values(points, "nonfinite_steps") == {5: 1, 6: 2}
    assert all(math.isfinite(p.value) for p in points)


def test_incidents_are_counted_at_the_next_step_and_only_when_they_change():
    source = Points()
    source.event(event(EventKind.GENERATION_FORMED, 0, seconds=3.0))
    points = source.step(line(1))
    for kind, seconds in ((EventKind.WORKER_LOST, None), (EventKind.WORKER_LOST, None)):
        source.event(event(kind, 2, seconds))
    source.event(event(EventKind.GENERATION_FORMED, 2, seconds=0.25))
    points += source.step(line(2)) + source.step(line(3)) + source.step(line(4))
    assert values(points, "incidents") == {3: 2}
    assert values(points, "recovery_s") == {3: 0.25}


def test_evaluations_follow_their_step():
    source = Points()
    source.evaluation(EvaluationRecord(2, 10, {"loss": 1.0, "bad": math.nan}, 0.1, 1, 1).__dict__)
    source.evaluation(EvaluationRecord(4, 10, {"loss": 0.8}, 0.1, 1, 1).__dict__)
    assert values(source.step(line(1)), "val_loss") == {}
    assert values(source.step(line(2)), "val_loss") == {2: 1.0}
    assert values(source.rest(), "val_loss") == {4: 0.8}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("top-5 acc", "top-5 acc"),
        ("a/b", "a/b"),
        ("../x", "___x"),
        ("f1@0.5", "f1_0.5"),
        ("/a", "_a"),
        (".", "_"),
    ],
)
def test_names_are_ones_the_tracker_takes(name, taken):
    from mlflow.utils.validation import _validate_metric_name

    assert metric_name(name) == taken
    _validate_metric_name(metric_name(name))


def test_recovery_is_the_time_until_the_next_generation():
    lost = event(EventKind.WORKER_LOST, 5, time=10.0)
    failed = event(EventKind.CHECKPOINT_FAILED, 6, time=20.0)
    found = incidents(
        [
            lost,
            event(EventKind.GENERATION_FORMED, 5, time=10.3),
            failed,
            lost,
            event(EventKind.GENERATION_FORMED, 6, seconds=0.2, time=40.0),
            lost,
            event(EventKind.ATTEMPT_STARTED, 0, time=1000.0),
            event(EventKind.GENERATION_FORMED, 6, time=1010.0),
        ]
    )
    assert [round(i.recovery_s, 6) if i.recovery_s is not None else None for i in found] == [
        0.3,
        None,
        0.2,
        None,
    ]


def drain(spool):
    batches = []
    while spool.read() or spool.take():
        while batch := spool.take():
            batches.append(batch)
            spool.taken()
    return batches


def test_batches_hold_whole_steps_within_the_limit(tmp_path):
    log = StepLog(tmp_path / STEPS)
    log.append([replace(RECORD, step=k) for k in range(1, 101)])
    batches = drain(Spool(tmp_path, limit=35))
    assert [len(batch.points) for batch in batches] == [30] * 33 + [10]
    assert [batch.through for batch in batches] == [*range(3, 100, 3), 100]
    assert all({p.step for p in batch.points} == set(range(batch.through - 2, batch.through + 1)) for batch in batches[:33])  # noqa: E501  # fmt: skip


def test_one_step_larger_than_a_batch_is_delivered_with_its_last_part(tmp_path):
    StepLog(tmp_path / STEPS).append([replace(RECORD, step=1, metrics={f"m{k}": 0.0 for k in range(50)})])
    batches = drain(Spool(tmp_path, limit=25))
    assert [(len(b.points), b.through) for b in batches] == [(25, 0), (25, 0), (10, 1)]


def test_a_replaced_log_is_read_again_from_its_start_with_all_its_events(tmp_path):
    log, events = StepLog(tmp_path / STEPS), EventLog(tmp_path / EVENTS)
    evaluations = EvaluationLog(tmp_path / EVALUATIONS)
    log.append([replace(RECORD, step=k) for k in range(1, 6)])
    events.append([event(EventKind.WORKER_LOST, 1)])
    evaluations.append(EvaluationRecord(2, 10, {"loss": 1.0}, 0.1, 1, 1))
    spool = Spool(tmp_path)
    before = [p for batch in drain(spool) for p in batch.points]
    log.truncate(after_step=3)
    log.append([replace(RECORD, step=4, loss=0.25)])
    after = [p for batch in drain(spool) for p in batch.points]
    assert values(before, "incidents") == values(after, "incidents") == {2: 1}
    assert values(before, "val_loss") == values(after, "val_loss") == {2: 1.0}
    assert values(after, "loss") == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.25}


def test_memory_is_bounded_when_nothing_can_be_sent(tmp_path):
    log = StepLog(tmp_path / STEPS)
    log.append([replace(RECORD, step=k) for k in range(1, 20_001)])
    spool = Spool(tmp_path)
    while spool.read():
        pass
    held = 0
    while batch := spool.take():
        held += len(batch.points)
        spool.taken()
    assert held < 60_000
    assert spool.read()
