"""An operator acts on a live run from another terminal; a fault script harms it. The line stays the same."""

from __future__ import annotations

import json

import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster

PATIENCE = ("--timeout", "100")


def shrink(run, world: int) -> None:
    """Let step after step complete until no more workers than so many train."""
    while run.status["world"] > world:
        run.more(steps=1)


def test_a_run_is_resized_and_stopped_by_command(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=3).start()
    survivors = set(run.at(step=3).members.values())
    code, said = run.operate("resize", "1", *PATIENCE)
    assert code == 0, said
    shrink(run, 1)
    assert set(run.members.values()) < survivors
    code, said = run.operate("resize", "2", *PATIENCE)
    assert code == 0, said
    run.workers = 2
    run.grow()
    for wrong, reason in (("0", "0"), ("9", "9 is above batch.logical_shards, which is 8")):
        code, said = run.operate("resize", wrong, *PATIENCE)
        assert (code, reason in said) == (64, True), said
    code, said = run.operate("drain", "7", *PATIENCE)
    assert code == 64, said
    run.open()
    code, said = run.operate("stop", *PATIENCE)
    assert code == 0, said
    run.finish(75)
    assert said.startswith(f"run stopped at step {len(run.steps)} of 40: asked for by ")
    assert run.checkpoints[-1] == len(run.steps)
    assert not list((run.storage / "run" / "requests").iterdir())
    code, said = run.operate("stop", *PATIENCE)
    assert (code, "nobody trains it" in said) == (75, True), said
    run.spawn().finish()
    assert run.line == undisturbed(EVERYTHING)
    assert run.worlds == {1, 2, 3}


def test_a_fault_script_harms_a_run(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=2)
    faults = [{"at_step": 4, "kill": 1}, {"at_step": 20, "kill": 5}, {"at_step": 22, "remove": 1}]
    (run.folder / "chaos.yaml").write_text(json.dumps({"faults": faults}))
    run.start("--chaos", "chaos.yaml").open(step=4)
    run.until(lambda: len(run.events("worker_lost")) == 1, "the kill")
    run.at(step=5).grow()
    run.at(step=22)
    run.until(lambda: len(run.events("resized")) == 1, "the resize")
    shrink(run, 1)
    run.finish()
    assert run.line == undisturbed(EVERYTHING)
    said = [event["reason"].partition(" (")[0] for event in run.events("fault_injected")]
    assert said == ["SIGKILL to rank 1", "no kill: there is no rank 5", "1 worker less"]


def test_a_fault_script_that_is_wrong_starts_nothing(scenario) -> None:
    run = scenario(EVERYTHING)
    (run.folder / "chaos.yaml").write_text("faults: [{at_step: 4, kil: 1}]")
    run.spawn("--chaos", "chaos.yaml").finish(78)
    assert "chaos.yaml: faults[0].kil: unknown key; did you mean 'faults[0].kill'?" in run.said
    assert not (run.storage / "run").exists()
