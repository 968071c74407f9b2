"""Drivers come and go: stopped, killed, refused, resumed."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster


def test_a_killed_driver(scenario, undisturbed) -> None:
    """Ray goes with its driver, the next one goes on in another world, MLflow shows one run."""
    run = scenario(EVERYTHING, workers=3, as_a_user=True, tracking__enabled=True, checkpoint__every_steps=10)
    run.start().at(step=17).until(lambda: run.checkpoints == [10], "the checkpoint")
    run.kill_driver()
    run.start(world__max=2).finish()
    assert run.line == undisturbed(EVERYTHING)
    assert [step["attempt"] for step in run.steps] == [1] * 10 + [2] * 30
    tracked = run.tracked
    assert (tracked.name, tracked.status) == ("run", "FINISHED")
    assert tracked.id == run.status["mlflow_run_id"]
    assert len({(key, step) for key, step, _ in tracked.points}) == len(tracked.points)
    losses = {step: value for key, step, value in tracked.points if key == "loss"}
    assert losses == {step["step"]: step["loss"] for step in run.steps}
    assert tracked.tags["attempt"] == "2"
    assert tracked.tags["world.max"] == "2"


def test_stop_and_go_on(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=2, steps=28).start().at(step=9)
    code, said = run.ask()
    assert code == 75
    assert "is being trained here" in said
    run.terminate()
    stopped = len(run.steps)
    assert run.checkpoints == [stopped]
    assert run.status["state"] == "STOPPED"
    # At another size, to the end, and beyond it.
    run.start(world__max=1).finish()
    assert run.status["state"] == "FINISHED"
    assert [step["attempt"] for step in run.steps] == [1] * stopped + [2] * (28 - stopped)
    run.start(steps=40).finish()
    assert run.line == undisturbed(EVERYTHING)
    assert len(run.events("restored")) == 2
    # Afresh: what was there stays, under another name.
    old = run.steps
    run.spawn("--resume", "never", gate=3, steps=3).finish()
    assert len(run.steps) == 3
    assert run.read("../run.1/steps.jsonl") == old


def test_a_stop_while_starting(scenario) -> None:
    """Ray starts meanwhile, with handlers of its own."""
    run = scenario(EVERYTHING, as_a_user=True).spawn()
    run.until(lambda: bool(run.events("attempt_started")), "the attempt")
    run.terminate()
    assert run.status["state"] == "STOPPED"
    assert run.last_word == "SIGTERM"


def test_what_is_not_the_same_run_is_refused(scenario) -> None:
    run = scenario(EVERYTHING, steps=3).spawn(gate=3).finish()
    before = run.steps
    code, said = run.ask(seed=99, gradient__clip_norm=0.7)
    assert code == 78
    assert "seed: the run was begun with 1234, the job now says 99" in said
    assert "gradient.clip_norm: the run was begun with 0.5, the job now says 0.7" in said
    rows = run.folder / "data"
    shared = rows.readlink()
    rows.unlink()
    shutil.copytree(shared, rows)
    table = pq.read_table(rows / "part-01.parquet")
    pq.write_table(table[:-1], rows / "part-01.parquet")
    code, said = run.ask(steps=6)
    assert code == 78
    assert "part-01.parquet has changed" in said
    assert run.steps == before
