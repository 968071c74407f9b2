"""The durable logs: exact round trips, each step once, what a crash tears."""

import errno
import json
import math
import os
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldline.events import EvaluationRecord, Event, EventKind, StepRecord
from worldline.tracking import jsonl
from worldline.tracking.log import (
    EvaluationLog,
    EventLog,
    StepLog,
    read_evaluations,
    read_events,
    read_steps,
)

RECORD = StepRecord(
    step=0, epoch=0, loss=0.5, lr=0.1, grad_norm=0.3, rows=32, world=2, generation=1, attempt=1, step_s=0.05,
    data_s=0.001, compute_s=0.04, reduce_s=0.005, state_digest=None, rows_digest="ab", time=1.7e9,
)  # fmt: skip


def record(step, **changes):
    return replace(RECORD, step=step, **changes)


def steps_in(path):
    return [fields["step"] for fields in read_steps(path)]


@given(st.floats(), st.floats(), st.dictionaries(st.text(max_size=5), st.floats(), max_size=3))
def test_every_float_round_trips_to_the_same_bits(loss, norm, metrics):
    fields = {"loss": loss, "grad_norm": norm, "metrics": metrics}
    line = jsonl.encode(fields)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(jsonl.decode(line)) == repr(fields)


def test_text_that_looks_like_a_number_stays_text():
    assert jsonl.decode('{"reason": "NaN"}') == {"reason": "NaN"}


def test_a_step_line_has_the_contract_s_fields(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    log.append([record(1), record(2, skipped=True, loss=math.nan, metrics={"accuracy": 0.5})])
    first, second = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert " ".join(json.loads(first)) == (
        "step epoch loss lr grad_norm rows world generation attempt step_s data_s compute_s reduce_s "
        "state_digest rows_digest time"
    )
    assert json.loads(second)["loss"] == "NaN"
    assert json.loads(second)["skipped"] is True
    assert math.isnan(read_steps(tmp_path / "steps.jsonl")[1]["loss"])


def test_each_step_once_in_order(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    assert log.append([record(1), record(2)]) == 2
    assert log.append([record(1), record(2), record(3)]) == 1
    assert log.last_step == 3
    with pytest.raises(ValueError, match=r"step 5 does not follow .it holds 1 to 3.; the next must be 4"):
        log.append([record(5)])
    assert StepLog(path).append([record(3), record(4)]) == 1
    assert steps_in(path) == [1, 2, 3, 4]


def test_a_refused_append_writes_nothing(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    with pytest.raises(ValueError, match="it is empty"):
        log.append([record(1), record(3)][1:])
    with pytest.raises(ValueError, match="the next must be 2"):
        log.append([record(1), record(3)])
    assert log.append([record(1)]) == 1
    assert steps_in(tmp_path / "steps.jsonl") == [1]


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(1, 6),
    cut=st.integers(1, 400),
    garbage=st.sampled_from([b"", b"\0\0\0", b'{"x"\n', b"7\n"]),
)
def test_whatever_a_crash_tears_off_the_log_goes_on_behind_the_last_whole_line(
    tmp_path_factory, num, cut, garbage
):
    path = tmp_path_factory.mktemp("torn") / "steps.jsonl"
    log = StepLog(path)
    log.append([record(k + 1) for k in range(num)])
    log.close()
    whole = path.read_bytes()
    kept = whole[: max(len(whole) - cut, 0)]
    path.write_bytes(kept + garbage)
    num_whole = kept.count(b"\n")
    again = StepLog(path)
    assert again.last_step == num_whole
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:num_whole])
    again.append([record(k + 1) for k in range(num_whole, num + 1)])
    assert steps_in(path) == list(range(1, num + 2))


def test_what_a_full_disk_does_not_take_goes_first_once_there_is_room(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    room, write = 100, os.write

    def write_if_there_is_room(descriptor, data):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write_if_there_is_room)
    assert log.append([record(1)]) == 1
    assert log.append([record(2), record(3)]) == 2
    assert path.stat().st_size == 100
    for act in (log.sync, lambda: log.truncate(1)):
        with pytest.raises(OSError, match=r"cannot write .*steps\.jsonl: No space left on device"):
            act()
    room = 10**6
    log.append([record(4)])
    assert steps_in(path) == [1, 2, 3, 4]
    log.sync()


def test_a_line_that_one_thread_writes_while_another_syncs_is_there_once(tmp_path, monkeypatch):
    lines, write = jsonl.JsonLines(tmp_path / "lines"), os.write
    stop = threading.Event()

    def sync():
        while not stop.is_set():
            lines.sync()

    def slowly(fd, data):
        time.sleep(0.0005)
        return write(fd, data[:5])

    monkeypatch.setattr(os, "write", slowly)
    syncing = threading.Thread(target=sync)
    syncing.start()
    for number in range(60):
        lines.write([f'{{"number": {number}}}'])
    stop.set()
    syncing.join()
    lines.close()
    assert [fields["number"] for fields in jsonl.read(tmp_path / "lines")] == list(range(60))


def test_readers_leave_out_a_torn_last_line_and_refuse_a_damaged_one_before_it(tmp_path):
    path = tmp_path / "steps.jsonl"
    assert read_steps(path) == []
    path.write_text('{"step": 1}\n{"st')
    assert read_steps(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_steps(path)


def test_truncate_takes_back_what_no_checkpoint_covers(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.append([record(k) for k in range(1, 11)])
    assert log.truncate(after_step=7) == 0
    assert log.last_step == 7
    assert log.truncate(after_step=7) == 0
    log.append([record(8, attempt=2)])
    assert [(f["step"], f["attempt"]) for f in read_steps(path)][-2:] == [(7, 1), (8, 2)]
    assert log.truncate(after_step=0) == 0
    log.append([record(1)])
    assert steps_in(path) == [1]
    assert os.listdir(tmp_path) == ["steps.jsonl"]


def test_an_earlier_driver_that_thaws_writes_to_nobody(tmp_path):
    old = StepLog(tmp_path / "steps.jsonl")
    old.append([record(1)])
    new = StepLog(tmp_path / "steps.jsonl")
    new.take_over()
    old.append([record(2)])
    new.append([record(2, loss=9.0)])
    old.append([record(3)])
    assert [(fields["step"], fields["loss"]) for fields in read_steps(tmp_path / "steps.jsonl")] == [
        (1, 0.5),
        (2, 9.0),
    ]


def test_a_log_that_lost_lines_goes_on_behind_the_checkpoint_and_says_how_many_are_missing(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    log.append([record(1), record(2)])
    assert log.truncate(after_step=5) == 3
    log.append([record(6)])
    assert steps_in(tmp_path / "steps.jsonl") == [1, 2, 6]


def test_opening_a_long_log_finds_its_end(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    log.append([record(k) for k in range(1, 2001)])
    assert path.stat().st_size > 1 << 16
    assert StepLog(path).last_step == 2000
    with open(path, "ab") as file:
        file.write(b"\0" * 300_000)
    assert StepLog(path).last_step == 2000


def test_evaluations_are_kept_once_a_step(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    log = EvaluationLog(path)
    assert log.append(EvaluationRecord(10, 100, {"loss": 2.0}, 0.1, 1, 1))
    assert not log.append(EvaluationRecord(10, 100, {"loss": 2.0}, 0.2, 2, 1))
    assert log.append(EvaluationRecord(20, 100, {"loss": math.inf}, 0.1, 1, 1))
    again = EvaluationLog(path)
    assert again.last_step == 20
    again.truncate(after_step=10)
    assert again.last_step == 10
    assert again.append(EvaluationRecord(20, 100, {"loss": 1.5}, 0.1, 3, 2))
    assert [(f["step"], f["metrics"]["loss"]) for f in read_evaluations(path)] == [(10, 2.0), (20, 1.5)]


def test_events_round_trip(tmp_path):
    events = [
        Event(1.5, EventKind.WORKER_LOST, 3, 7, 3, 2, ("w-1", "w-2"), "killed", 0.12),
        Event(2.5, EventKind.FINISHED, 4, 9, 2, 2),
    ]
    log = EventLog(tmp_path / "events.jsonl")
    log.append(events)
    assert read_events(tmp_path / "events.jsonl") == events
    assert " ".join(json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])) == (
        "time kind generation step world_before world_after workers reason seconds"
    )


def test_a_follower_sees_whole_lines_only_and_notices_a_replaced_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    follower = jsonl.Follower(path)
    assert follower.read() == []
    log = StepLog(path)
    log.append([record(1), record(2), record(3)])
    with open(path, "ab") as torn:
        torn.write(b'{"step": 4')
    assert [f["step"] for f in follower.read()] == [1, 2, 3]
    assert follower.read() == []
    log = StepLog(path)
    log.truncate(after_step=1)
    log.append([record(2)])
    assert [f["step"] for f in follower.read()] == [1, 2]
    assert follower.restarted
    assert [f["step"] for f in jsonl.Follower(path).read(limit=10)] == [1]
