"""What goes wrong outside the platform: a clear word, the right exit code, nothing lost, no process left."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cluster.cases import EVERYTHING
from tests.cluster.scenario import NEVER, Scenario

from worldline.data.audit import shard_rows
from worldline.data.plan import Plan
from worldline.data.scan import scan

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"data.train.path": "nothing"}, "data.train: no file or folder at"),
        ({"data.train.path": "empty.parquet"}, "empty.parquet have no rows"),
        ({"data.train.path": "short.parquet"}, "has 20 rows, but one step needs 64"),
        ({"data.train.columns": ["id", "z"]}, "part-00.parquet has no column 'z'"),
        (
            {"batch.rows_per_shrd": 4},
            "batch.rows_per_shrd: unknown key; did you mean 'batch.rows_per_shard'?",
        ),
        ({"batch.logical_shards": 6}, "logical_shards must be a power of two, not 6"),
        ({"task.class": "tiny:Tinny"}, "task.class: 'tiny' has no 'Tinny'; did you mean 'Tiny'?"),
        ({"task.args": {"widht": 4}}, "task.args.widht: unknown argument; did you mean 'width'?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_job_is_refused_before_anything_starts(scenario, settings, fault: str) -> None:
    run = scenario(EVERYTHING)
    for name, num in ("empty", 0), ("short", 20):
        pq.write_table(pa.table({"id": range(num)}), run.folder / f"{name}.parquet")
    code, said = run.ask(**settings)
    assert code == 78
    assert fault in said
    assert "Traceback" not in said
    assert not run.steps


def test_a_task_that_always_fails(scenario, undisturbed) -> None:
    """Tried three times; what was completed is kept, and the task, once it is right, goes on from there."""
    run = scenario(EVERYTHING, workers=2)
    (run.folder / "fault").write_text("raise 7")
    run.spawn(gate=NEVER).finish(code=1)
    assert run.said.count("RuntimeError: this task does not like step 7") >= 3
    assert run.said.count("Traceback (most recent call last)") == 1
    assert run.status["state"] == "FAILED"
    assert "the task's code raised 3 times" in run.last_word
    assert len(run.steps) == 6
    assert run.checkpoints == [6]
    (run.folder / "fault").unlink()
    run.spawn(gate=NEVER).finish()
    assert run.line == undisturbed(EVERYTHING)


def test_a_column_that_is_not_there(scenario) -> None:
    run = scenario(EVERYTHING, task__args={"column": "z"})
    run.spawn(gate=NEVER).finish(code=1)
    assert "KeyError: 'z'" in run.last_word
    assert run.said.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        ("Headless", r"Headless.build_model raised RuntimeError: there is no model today \(tiny.py:\d+, in"),
        ("Closure", r"LBFGS.step needs closure, .* Use an optimizer whose step needs nothing"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(scenario, task: str, fault: str) -> None:
    run = scenario(EVERYTHING, workers=2, **{"task.class": f"tiny:{task}"})
    run.spawn(gate=NEVER).finish(code=1)
    assert re.search(fault, run.last_word)
    assert not run.steps
    assert not run.events("generation_formed")


def test_a_loss_that_is_not_finite(scenario) -> None:
    """fail: the run ends before the bad update; skip, in another attempt: it is left out and told."""
    run = scenario(EVERYTHING, workers=2)
    plan = Plan(scan(str(run.folder / "data")), seed=1234, num_shards=8, rows_per_shard=8, window_rows=16)
    row = shard_rows(plan, 7, 5, {})[0]
    (run.folder / "fault").write_text(f"nan 7 {row}")
    run.spawn(gate=NEVER).finish(code=1)
    assert "the loss is not finite at step 7 (logical shards 5)" in run.last_word
    assert len(run.steps) == 6
    assert run.checkpoints == [6]
    run = scenario(EVERYTHING, workers=2, gradient__nonfinite="skip", steps=12)
    (run.folder / "fault").write_text(f"nan 7 {row}")
    run.spawn(gate=NEVER).finish()
    assert [step["step"] for step in run.steps if step.get("skipped")] == [7]
    assert run.events("nonfinite")[0]["reason"] == "the update of step 7 was skipped: not finite"
    weights = [step["state_digest"] for step in run.steps]
    assert len(set(weights)) == 12  # the schedule goes on


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk(scenario, undisturbed) -> None:
    """No room for a checkpoint, nor for a word in the logs: the training goes on, and says so in the end."""
    run = scenario(EVERYTHING, workers=2, checkpoint__every_steps=10)
    with small_disk(run.storage) as fill:
        run.start().at(step=12).until(lambda: run.checkpoints == [10], "the checkpoint")
        fill()
        run.finish(code=1)
        failed = "no checkpoint of step 20: "
        assert run.said.count(failed) == 1
        assert "No space left on device" in run.said
        assert "the state of step 40 is not saved" in run.said
        assert run.checkpoints == [10]
        # Room again, before the end: what the logs lack follows.
        fill(False)
        run.start().at(step=15)
        fill()
        run.reach(step=25).until(lambda: run.said.count(failed) == 2, "the failure")
        fill(False)
        run.finish()
        assert run.checkpoints == [10, 30, 40]
        assert run.line == undisturbed(EVERYTHING)


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[..., None]]:
    """Mounted at `folder`; the function it gives fills it to the last byte, or makes room again."""
    folder.mkdir()
    filler = folder / "filler"

    def fill(full: bool = True) -> None:
        filler.unlink(missing_ok=True)
        with suppress(OSError), open(filler, "wb", buffering=0) as file:
            while full:
                file.write(bytes(4096))

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_damaged_checkpoints(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, steps=30, checkpoint__every_steps=10).spawn(gate=NEVER).finish()
    damage(run, 30)
    run.spawn(gate=NEVER, steps=40).finish()
    [event] = run.events("checkpoint_passed_over")
    assert event["reason"].startswith("checkpoint checkpoints/step-00000030 is passed over: a1-")
    assert event["reason"] in run.said
    assert [event["reason"] for event in run.events("restored")] == ["checkpoints/step-00000020"]
    assert run.line == undisturbed(EVERYTHING)
    for step in run.checkpoints:
        damage(run, step)
    code, said = run.ask(steps=50)
    assert code == 1
    assert "none of the run's checkpoints is usable" in said
    assert all(f"checkpoints/step-{step:08}: a" in said for step in run.checkpoints)
    assert run.line == undisturbed(EVERYTHING)


def damage(run: Scenario, step: int) -> None:
    """One bit of one tensor."""
    file = run.parts(step)[0]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    Path(file).write_bytes(content)
