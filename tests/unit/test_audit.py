"""Every row once: what an honest log proves, and that no dishonest one passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from worldline.data.audit import audit, shard_rows
from worldline.data.ledger import rows_digest
from worldline.data.manifest import FileEntry, IntArray, Manifest
from worldline.data.plan import Plan, WindowKey
from worldline.worker.words import StepTotals, StepWords
from worldline.world import assign

Steps = list[dict[str, Any]]


def make_plan(groups: tuple[int, ...], **changes: Any) -> Plan:
    manifest = Manifest((FileEntry("part.parquet", 1, groups, "d"),), (("x", "float"),), "/data")
    given: dict[str, Any] = {"seed": 1, "num_shards": 4, "rows_per_shard": 2, "window_rows": 5}
    return Plan(manifest, **(given | changes), allow_short=True)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    groups = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    return make_plan(
        tuple(groups),
        seed=draw(st.integers(0, 2**63 - 1)),
        num_shards=draw(st.sampled_from([1, 2, 4, 8])),
        rows_per_shard=draw(st.integers(1, 6)),
        window_rows=draw(st.integers(1, 12)),
        shuffle=draw(st.booleans()),
    )


def trained(plan: Plan, num_steps: int, world: int) -> Steps:
    """What a world of this size logs: each replica fills the words of its shards, all are combined."""
    log = []
    windows: dict[WindowKey, IntArray] = {}
    for step in range(1, num_steps + 1):
        parts = []
        for own in assign(plan.num_shards, world):
            words = StepWords(own.start, len(own.shards), 0)
            for shard in own.shards:
                row_ids = shard_rows(plan, step, shard, windows)
                if len(row_ids):
                    words.set(shard, 1.0, 1.0, len(row_ids), rows_digest(row_ids), 0)
            parts.append(words.tensor)
        totals = StepTotals.combine(torch.cat(parts))
        log.append({"step": step, "rows": totals.rows, "rows_digest": totals.rows_digest})
    return log


@settings(deadline=None, max_examples=40)
@given(plans(), st.integers(1, 8), st.integers(1, 3))
def test_an_honest_log_proves_that_every_row_came_once(plan: Plan, world: int, epochs: int) -> None:
    world = min(world, plan.num_shards)
    num_steps = epochs * plan.steps_per_epoch + 1
    result = audit(plan, trained(plan, num_steps, world))
    assert result.faults == ()
    assert result.num_steps == num_steps
    whole = [(e.epoch, e.steps, e.rows) for e in result.epochs if e.complete]
    assert whole[:epochs] == [(k, plan.steps_per_epoch, plan.manifest.num_rows) for k in range(epochs)]
    assert result.rows == sum(step["rows"] for step in trained(plan, num_steps, 1))


@settings(deadline=None, max_examples=40)
@given(plans(), st.data())
def test_another_seed_is_found_out(plan: Plan, data: st.DataObject) -> None:
    other = make_plan(
        tuple(plan.manifest.group_rows.tolist()),
        seed=data.draw(st.integers(0, 2**63 - 1)),
        num_shards=plan.num_shards,
        rows_per_shard=plan.rows_per_shard,
        window_rows=plan.window_rows,
    )
    log = trained(other, plan.steps_per_epoch, 1)
    same = all(
        np.array_equal(shard_rows(plan, step, shard, {}), shard_rows(other, step, shard, {}))
        for step in range(1, plan.steps_per_epoch + 1)
        for shard in range(plan.num_shards)
    )
    assert bool(audit(plan, log).faults) == (not same)


@settings(deadline=None, max_examples=40)
@given(plans(), st.data())
def test_a_lost_or_repeated_step_is_found_out(plan: Plan, data: st.DataObject) -> None:
    log = trained(plan, 2 * plan.steps_per_epoch, 1)
    k = data.draw(st.integers(0, len(log) - 1))
    lost = audit(plan, log[:k] + log[k + 1 :])
    assert bool(lost.faults) == (k < len(log) - 1)  # at the end nothing shows that it ever was
    assert audit(plan, [*log[: k + 1], log[k], *log[k + 1 :]]).faults


@settings(deadline=None, max_examples=40)
@given(plans(), st.data())
def test_rows_of_another_step_are_found_out(plan: Plan, data: st.DataObject) -> None:
    log = trained(plan, plan.steps_per_epoch, 1)
    a, b = (data.draw(st.integers(0, len(log) - 1)) for _ in range(2))
    assume(log[a]["rows_digest"] != log[b]["rows_digest"])
    log[a] = {**log[b], "step": a + 1}
    faults = audit(plan, log).faults
    assert faults[0].startswith(f"step {a + 1} trained other rows than the plan demands")


def test_what_the_faults_say() -> None:
    plan = make_plan((40,))
    log = trained(plan, 5, 2)
    assert audit(plan, log[:2] + log[3:]).faults == ("step 3 is missing in the log",)
    assert audit(plan, log[3:]).faults == ("steps 1 to 3 are missing in the log",)
    assert audit(plan, [*log, log[1]]).faults == ("step 2 comes again after step 5",)
    log[0] |= {"rows": 9}
    assert audit(plan, log).faults == ("step 1 counts 9 rows, the plan 8",)


def test_steps_that_left_their_update_out_are_counted() -> None:
    plan = make_plan((40,))
    log = trained(plan, 5, 2)
    log[1]["skipped"] = True
    result = audit(plan, log)
    assert (result.num_skipped, result.faults) == (1, ())


def test_the_faults_do_not_flood() -> None:
    plan = make_plan((400,))
    log = [step | {"rows_digest": "0"} for step in trained(plan, 50, 1)]
    assert len(audit(plan, log).faults) == 20


def test_no_step_no_epoch() -> None:
    assert audit(make_plan((40,)), []).epochs == ()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_digest_is_blind_to_the_world(world: int) -> None:
    plan = make_plan((7, 40, 3))
    assert trained(plan, 9, world) == trained(plan, 9, 1)
