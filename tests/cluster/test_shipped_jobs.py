"""The shipped jobs, shrunk: with Ray Data or the workers' own reader, any history gives one line."""

from __future__ import annotations

import pytest
from tests.cluster.cases import DIGITS, GPT

pytestmark = pytest.mark.cluster


def test_through_ray_data(scenario, undisturbed) -> None:
    """Worlds 3, 2, 1 and 3 again; in mid-epoch the driver dies, and two workers go on."""
    run = scenario(GPT, workers=3, data__pipeline="ray", checkpoint__every_steps=6).start()
    run.at(step=4).kill(rank=1)
    run.more(steps=3).leave(1)
    run.more(steps=3).grow()
    run.more(steps=3).until(lambda: bool(run.checkpoints), "a checkpoint")
    run.kill_driver()
    run.start(world__max=2).finish()
    assert len(run.events("restored")) == 1
    assert run.worlds == {1, 2, 3}
    assert run.line == undisturbed(GPT)


def test_with_batch_norm_and_evaluation(scenario, undisturbed) -> None:
    """Worlds 3, 2 and, after the driver's death, 1."""
    run = scenario(DIGITS, workers=3, data__pipeline="ray", checkpoint__every_steps=6).start()
    run.at(step=4).leave(2)
    run.more(steps=5).until(lambda: run.checkpoints == [6], "the checkpoint")
    run.kill_driver()
    run.start(world__max=1).finish()
    assert len(run.events("restored")) == 1
    assert run.worlds == {1, 2, 3}
    assert run.line == undisturbed(DIGITS)
