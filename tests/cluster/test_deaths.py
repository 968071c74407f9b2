"""Workers die: the others go on where they were."""

from __future__ import annotations

import random

import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster


def test_many_deaths_in_one_run(scenario, undisturbed) -> None:
    """One after another, several together, all but one, all."""
    rng = random.Random(7)
    run = scenario(EVERYTHING, workers=4, checkpoint__every_steps=10).start()
    run.at(step=5).kill(rank=0)
    run.more(steps=2).kill(rank=rng.randrange(3))
    run.more(steps=2).grow()
    run.more(steps=1).kill(*rng.sample(range(4), 3))
    run.more(steps=3)
    assert run.status["world"] == 1
    run.grow().more(steps=1)
    assert not run.events("restored")
    newest = run.checkpoints[-1]
    run.kill(0, 1, 2, 3).more(steps=2)
    assert [event["reason"] for event in run.events("restored")] == [f"checkpoints/step-{newest:08}"]
    run.finish()
    assert run.line == undisturbed(EVERYTHING)
    assert len(run.events("worker_lost")) == 9


def test_deaths_at_delicate_moments(scenario, undisturbed) -> None:
    run = scenario(EVERYTHING, workers=3, checkpoint__every_steps=20).start()
    # While a generation forms: the newcomer, who receives the state; then rank 0, who sends it.
    run.at(step=4).kill(rank=2).more(steps=1)
    run.hold("load").joiners()
    run.kill_processes(*run.lead_to("load")).release("load").more(steps=1)
    run.hold("load").joiners().lead_to("load")
    run.kill(rank=0).release("load").more(steps=1).grow()
    # While the checkpoint of step 20 is written: the others' parts are there already.
    run.at(step=19).hold("state-20", run.members[1]).open(step=20).held("state-20")
    run.until(lambda: len(run.parts(20)) == 2, "two parts")
    run.kill(rank=1).release("state-20").at(step=21).grow()
    # In the evaluation after step 28.
    run.hold("evaluate").open(step=29)
    run.kill_processes(run.held("evaluate", num=3)[0]).release("evaluate").at(step=29).grow()
    # In the last step, which the others have completed already.
    run.at(step=39).hold("state-40", run.members[0]).open().held("state-40")
    run.until(lambda: len(run.parts(40)) == 2, "two parts")
    run.kill(rank=0).release("state-40").finish()
    assert run.line == undisturbed(EVERYTHING)
    assert not run.events("restored")
    assert run.checkpoints == [20, 40]
