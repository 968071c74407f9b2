"""Work that is not the same on every rank: nobody waits for ever, and the step is one for all.

What others saw go wrong, and where it is shown not to here:

    pytorch/pytorch#17113             one process dies, the rest wait for ever: a death in mid-step
    ray-project/ray#66085             ranks take different numbers of batches: micro-batches count once; rows
                                      that come short: tests/unit/test_engine.py
    Lightning-AI/pytorch-lightning#19987  an incomplete accumulation window is dropped or divided by the
                                      wrong count: micro-batches count once; tests/unit/test_engine.py
    pytorch/pytorch#44353             one rank is out of memory, the others block: what one rank alone meets;
                                      rows that the task leaves out; tests/unit/test_runner.py
    Lightning-AI/pytorch-lightning#19106  ranks log other names of metrics: what one rank alone says;
                                      tests/unit/test_metrics.py, tests/unit/test_engine.py
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from tests.cluster.cases import EVERYTHING, Case, numbered
from tests.cluster.processes import is_alive
from tests.cluster.scenario import NEVER, Scenario

from worldline.data.audit import audit, shard_rows
from worldline.data.plan import Plan
from worldline.data.scan import scan

pytestmark = pytest.mark.cluster

UNEVEN = {"task.class": "uneven:Uneven"}
UNEVEN_BLOCKS = Case(
    "uneven blocks",
    numbered(
        30, 10, 4, row_group=30
    ),  # two shards of 22 rows: 6 steps an epoch, the last of two micro-batches
    {
        "batch.logical_shards": 2,
        "batch.rows_per_shard": 1,
        "batch.accumulate": 4,
        "data.window_rows": 16,
        "steps": 12,
        "task.args": {"norm": False},
    },
)


def test_a_death_in_mid_step_before_any_checkpoint(scenario, undisturbed) -> None:
    """The others wait for its gradients when it dies: first for rank 1's, later for rank 0's."""
    run = scenario(EVERYTHING, workers=3, checkpoint__every_steps=1000, **UNEVEN).start()
    for step, rank in (7, 1), (14, 0):
        pid = run.at(step=step - 1).members[rank]
        run.hold(f"micro-{step}-2", pid).open(step).held(f"micro-{step}-2")
        killed = time.time()
        run.kill(rank=rank).at(step)
        assert run.steps[step - 1]["time"] - killed < 30
        assert not is_alive(pid)
        assert not run.checkpoints
    run.finish()
    assert not run.events("restored")
    assert run.line == undisturbed(EVERYTHING)


def test_micro_batches_of_an_interrupted_step_count_once(scenario, undisturbed) -> None:
    """Blocks of 30, 10 and 4 rows through Ray Data; a death after two of four micro-batches, and one in the
    middle of an epoch's last window, which is short."""
    run = scenario(UNEVEN_BLOCKS, workers=2, data__pipeline="ray", **UNEVEN).start()
    victims = {}
    for step, micro in (8, 2), (12, 1):
        victims[step] = run.grow().at(step - 1).members[1]
        run.hold(f"micro-{step}-{micro}", victims[step]).open(step).held(f"micro-{step}-{micro}")
        run.kill(rank=1)
        if step < 12:
            run.at(step)
    run.finish()
    plan = Plan(scan(str(run.folder / "data")), seed=1234, num_shards=2, rows_per_shard=4, window_rows=16)
    assert [step["rows"] for step in run.steps] == [8, 8, 8, 8, 8, 4] * 2
    assert audit(plan, run.steps).faults == ()
    # The survivor did the other's micro-batches, and its own not again.
    for step, lost in (8, 2), (12, 1):
        planned = Counter(row for shard in (0, 1) for row in shard_rows(plan, step, shard, {}).tolist())
        again = run.seen[step] - planned
        assert set(run.seen[step]) == set(planned)
        assert sorted(again.values()) == [1] * lost
    assert run.line == undisturbed(UNEVEN_BLOCKS)


def test_what_one_rank_alone_says_and_meets(scenario, undisturbed) -> None:
    """Metrics of a name of its own, or none in odd steps. No memory in one micro-batch: all do the step
    again, and it counts as an error of the task."""
    run = scenario(EVERYTHING, workers=3, **UNEVEN).start().at(step=5)
    for rank, role in enumerate(("a", "b", "even")):
        (run.folder / f"role-{run.members[rank]}").write_text(role)
    (run.folder / "memory").write_text(f"7 {run.members[1]}")
    run.finish()
    assert run.steps[-1]["world"] == 3
    assert not run.events("worker_lost")
    [event] = run.events("task_error")
    assert event["reason"].startswith("rank 1: MemoryError: no memory left")
    assert event["step"] == 6
    for step in run.steps[5:]:
        every = {"a": 1.0, "b": 2.0} | ({} if step["step"] % 2 else {"even": 3.0})
        assert step["metrics"] == every
    plan = plan_of_everything(run)
    assert set(run.seen[7]) == {row for shard in range(8) for row in shard_rows(plan, 7, shard, {}).tolist()}
    assert without_metrics(run.line) == without_metrics(undisturbed(EVERYTHING))


def test_rows_that_the_task_leaves_out_are_left_out_alike_in_any_world(scenario, undisturbed) -> None:
    """It catches the error itself and goes on: nobody waits, and one worker's line is the same."""
    lines = []
    for workers in (2, 1):
        run = scenario(EVERYTHING, workers, **{"task.class": "uneven:Careless"}, steps=12)
        plan = plan_of_everything(run)
        (run.folder / "greedy").write_text(str(shard_rows(plan, 7, 3, {})[0]))
        lines.append(run.spawn(gate=NEVER, world__min=workers).finish().line)
        assert not run.events("task_error")
    assert lines[0] == lines[1]
    before, after = lines[0][:6], lines[0][6]
    undisturbed_line = undisturbed(EVERYTHING)
    assert before == undisturbed_line[:6]
    assert after["loss"] != undisturbed_line[6]["loss"]
    assert after["rows_digest"] == undisturbed_line[6]["rows_digest"]


def plan_of_everything(run: Scenario) -> Plan:
    return Plan(scan(str(run.folder / "data")), seed=1234, num_shards=8, rows_per_shard=8, window_rows=16)


def without_metrics(line: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the steps: those of evaluations are the job's own."""
    own = "rows_digest"
    return [{k: v for k, v in record.items() if k != "metrics" or own not in record} for record in line]
