"""Every row once an epoch, whoever dies: by the ids that the task saw, the log's digests and the plan."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.cluster.cases import FEW_ROWS, MANY_ROWS, Case
from tests.cluster.scenario import Scenario

from worldline.data.audit import planned_digest, shard_rows
from worldline.data.plan import Plan
from worldline.data.scan import scan

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("case", "num_rows"), [(FEW_ROWS, 31), (MANY_ROWS, 100_000)], ids=lambda x: getattr(x, "name", "")
)
def test_each_row_once_an_epoch(scenario, undisturbed, case: Case, num_rows: int) -> None:
    run = scenario(case, workers=3).start()
    run.at(step=2).kill(rank=2)
    run.more(steps=1).kill(rank=0)
    run.more(steps=1).grow()
    run.more(steps=2).leave(1)
    run.finish()
    plan = plan_of(run, case)
    planned = {step["step"]: planned_rows(plan, step["step"]) for step in run.steps}
    assert [step["rows_digest"] for step in run.steps] == [planned_digest(plan, step) for step in planned]
    assert [step["rows"] for step in run.steps] == [len(rows) for rows in planned.values()]
    # Each epoch's steps are a partition of all rows.
    for epoch in range(len(planned) // plan.steps_per_epoch):
        first = 1 + epoch * plan.steps_per_epoch
        rows = np.concatenate([planned[first + index] for index in range(plan.steps_per_epoch)])
        assert np.array_equal(np.sort(rows), np.arange(num_rows))
    # What the task saw is what was planned; more than once only in a step that a death interrupted.
    disturbed = {event["step"] + 1 for event in run.events("worker_lost")}
    seen = run.seen
    for step, rows in planned.items():
        if step in disturbed:
            assert seen[step].keys() == set(rows.tolist())
        else:
            assert seen[step] == Counter(rows.tolist())
    assert run.line == undisturbed(case)


def plan_of(run: Scenario, case: Case) -> Plan:
    return Plan(
        scan(str(run.folder / "data")),
        seed=1234,
        num_shards=8,
        rows_per_shard=case.settings["batch.rows_per_shard"],
        window_rows=4096,
    )


def planned_rows(plan: Plan, step: int) -> np.ndarray:
    return np.concatenate([shard_rows(plan, step, shard, {}) for shard in range(plan.num_shards)])
