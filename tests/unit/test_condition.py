"""What a worker tells of itself while its training thread is stuck, and whom that gives away."""

import os
import re
import signal
import sysconfig
import threading
from dataclasses import replace
from traceback import FrameSummary

import pytest
from tests.unit import tiny
from tests.unit.ranks import peers, until
from tests.unit.test_runner import assert_finished, holders
from tests.unit.tiny import Case, Line, kinds

from worldline.collective.operations import Operation
from worldline.health import stack
from worldline.health.condition import Condition, capture
from worldline.health.hang import diagnose
from worldline.worker.orders import EndKind

STDLIB = sysconfig.get_paths()["stdlib"]
TORCH = sysconfig.get_paths()["purelib"] + "/torch/nn/module.py"
OURS = stack.__file__.replace("health", "worker")


def frames(*files):
    return [FrameSummary(file, 10 + i, f"f{i}", line="") for i, file in enumerate(files)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("/job.py", OURS, "/model.py", TORCH, STDLIB + "/threading.py"), "/model.py:12 in f2"),
        (("/job.py", "<string>"), "/job.py:10 in f0"),
        ((STDLIB + "/threading.py", OURS, TORCH), f"{TORCH}:12 in f2"),
        ((), ""),
    ],
)
def test_the_line_that_is_told_is_the_jobs_own(files, expected):
    assert stack.where(frames(*files), stack.library_folders()) == expected


def deep(depth, inside, leave):
    if depth:
        deep(depth - 1, inside, leave)
    else:
        inside.set()
        leave.wait()


def test_a_deep_stack_is_cut_at_its_outer_end():
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=deep, args=(100, inside, leave))
    thread.start()
    try:
        inside.wait()
        until(lambda: stack.frames_of(thread.ident)[-1].name == "wait")
        condition = capture(thread.ident, None, generation=2, step=5, phase="data", since=10.0, now=12.5)
        assert len(stack.frames_of(thread.ident)) == stack.NUM_FRAMES
    finally:
        leave.set()
        thread.join()
    assert (condition.generation, condition.step) == (2, 5)
    assert (condition.phase, condition.phase_s) == ("data", 2.5)
    assert re.fullmatch(rf"{__file__}:\d+ in deep", condition.where)
    assert "in wait" in condition.stack.splitlines()[-2]
    assert condition.waits_in is None
    gone = capture(thread.ident, None, generation=2, step=5, phase="idle", since=10.0, now=12.5)
    assert (gone.where, gone.stack) == ("", "")


def test_how_far_a_rank_came():
    entered = (Operation(0, 3, "all_to_all", "a", 1), Operation(0, 4, "all_to_all", "b", 1))
    condition = Condition(1, 5, "reduce", 0.0, entered=entered)
    assert condition.has_entered(Operation(0, 4, "all_to_all", "x", 9))
    assert condition.has_entered(Operation(0, 2, "all_to_all", "x", 9))
    assert not condition.has_entered(Operation(0, 5, "all_to_all", "x", 9))
    assert not condition.has_entered(Operation(1, 0, "all_to_all", "x", 9))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(loss="weighted", last_step=4, storage=str(tmp_path_factory.mktemp("storage")))


@pytest.fixture(scope="module")
def truth(case):
    with peers(1) as (alone,):
        line = Line(case)
        line.build([alone])
        digests = {0: alone.call(tiny.state_digest)}
        line.run([alone])
        records = alone.call(tiny.told)
    return digests | {record[0]: record[5] for record in records}, records


def conditions_once_stuck(members, generation, answering):
    """By rank; once all who can answer wait in an operation or are where they were held up."""

    def ask():
        asked = [peer.now(tiny.condition, generation) if peer in answering else None for peer in members]
        return dict(enumerate(asked))

    def stuck():
        found = [c for c in ask().values() if c is not None]
        return all(c.waits_in is not None or "in loop" in c.where for c in found)

    until(stuck)
    return ask()


@pytest.mark.parametrize(("point", "phase"), [(0, "compute"), (3, "compute"), (12, "reduce")])
def test_an_endless_loop_is_named_by_its_line(case, truth, point, phase):
    """Before its first operation of the step, between two, and after some of its buckets are on the way."""
    with peers(3) as members:
        line = Line(case)
        line.build(members)
        members[1].call(tiny.arm, "loop", 2, point)
        line.begin(members)
        until(lambda: members[1].now(tiny.count_points) > point)
        conditions = conditions_once_stuck(members, line.generation, members)
        names = {rank: f"worker w{rank + 1} on node n{rank}" for rank in range(3)}
        verdict = diagnose(conditions, line.generation, names)
        assert verdict.culprits == (1,)
        assert not verdict.tied
        assert re.search(
            r"^Ranks 0 and 2 wait in all_to_all .* bytes\)\. Rank 1 \(worker w2 on node n1\) has not entered "
            rf".*in phase {phase} for .* s, after 1 completed step, at .*tiny\.py:\d+ in loop\.$",
            verdict.text,
        ), verdict.text
        assert conditions[0].waits_in == verdict.operation
        assert conditions[0].waits_in in conditions[0].unfinished
        assert "in loop" in conditions[1].stack

        members[1].now(tiny.free)
        line.abandon(members)
        ends = line.ends()
        assert set(kinds(ends)) <= {EndKind.BROKEN, EndKind.FINISHED}
        assert members[0].now(tiny.condition, line.generation).phase == "idle"
        assert_finished(line, members, truth, holders(ends, line))


def hold_the_rows(room):
    """The validation rows do not come, until it is freed."""
    source = room.loaders[1]._source
    fetch = source.fetch

    def wait(*args):
        room.freed.wait()
        return fetch(*args)

    source.fetch = wait


def test_who_waits_for_rows_is_not_to_blame_in_an_evaluation_either(case):
    with peers(3) as members:
        line = Line(replace(case, evaluate_every=2, watched=False))
        line.build(members)
        members[1].call(hold_the_rows)
        line.begin(members)

        def ask():
            return {r: peer.now(tiny.condition, line.generation) for r, peer in enumerate(members)}

        until(lambda: ask()[1].phase == "data" and all(ask()[rank].waits_in for rank in (0, 2)))
        verdict = diagnose(ask(), line.generation)
        assert verdict.culprits == ()
        assert re.search(
            r"^Ranks 0 and 2 wait in all_to_all evaluation after step 2 .* Rank 1 .* has waited for rows for",
            verdict.text,
        )
        members[1].now(tiny.free)
        assert kinds(line.ends()) == [EndKind.FINISHED] * 3


def test_a_stopped_process_is_named_by_its_silence(case, truth):
    with peers(3) as members:
        line = Line(case)
        line.build(members)
        members[2].call(tiny.arm, "stop", 2, 2)
        line.begin(members)
        members[2].wait_stopped()
        conditions = conditions_once_stuck(members, line.generation, members[:2])
        verdict = diagnose(conditions, line.generation)
        assert verdict.culprits == (2,)
        assert verdict.operation is not None
        assert verdict.reasons[2].startswith("gave no answer")
        line.abandon(members[:2])
        line.members = members[:2]
        ends = line.ends()
        os.kill(members[2].pid, signal.SIGKILL)
        assert_finished(line, members[:2], truth, holders(ends, line))


def test_of_another_generation_nothing_is_told_but_that(case):
    with peers(2) as members:
        line = Line(case)
        line.build(members)
        line.run(members)
        other = members[0].now(tiny.condition, line.generation + 1)
        assert (other.generation, other.entered, other.phase) == (line.generation, (), "idle")
        assert members[0].now(tiny.condition, line.generation).entered
        verdict = diagnose({0: other, 1: other}, line.generation + 1)
        assert verdict.culprits == (0, 1)
