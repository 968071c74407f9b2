"""Fewer workers than asked for: what is there trains, what is not is waited for, and no wait is for ever.

| what must hold | report |
| --- | --- |
| starts with what is there, asks for the rest, grows when it comes | F1, F2 |
| too few for `world.min`: a bounded wait, and its reason | F2 |
| who takes long to get ready holds nobody up, and is not given up for it | F12 |
| no helper of ours sits on a worker's node | F9 |
"""

from __future__ import annotations

import re

import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster


def test_more_workers_than_there_is_room_for(on_nodes, nodes, undisturbed) -> None:
    """The rest stays asked for, so that an autoscaler sees it, and joins when there is a node."""
    run = on_nodes(EVERYTHING, workers=8).start(whole=False).grow(to=3)
    assert nodes.demand() == [{"CPU": 1.0}] * 5
    run.add_node().grow(to=4)
    assert nodes.demand() == [{"CPU": 1.0}] * 4
    run.finish()
    assert run.line == undisturbed(EVERYTHING)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"world__min": 8, "world__max": 8},
            r"\d of at least 8 workers are ready; asked Ray for 8: \d ready, \d starting, [5-8] pending;",
        ),
        (
            {"world__gpus_per_worker": 1},
            r"0 of at least 1 workers are ready; asked Ray for 3: 0 ready, 0 starting, 3 pending; gave up",
        ),
    ],
    ids=["too few nodes", "no such node"],
)
def test_asked_for_what_is_not_there(on_nodes, settings, reason: str) -> None:
    run = on_nodes(EVERYTHING, failure__start_timeout_s=4, **settings).spawn().finish(code=75)
    assert run.status["state"] == "STOPPED"
    assert re.search(reason, run.last_word)
    assert not run.steps


def test_a_slow_start_is_not_a_failure(on_nodes, nodes, undisturbed) -> None:
    """One worker's build takes long. With min 2 that is one wait; with min 1 the other trains meanwhile.

    What else the run has on the cluster is beside the driver, so that a node without a worker can go.
    """
    run = on_nodes(EVERYTHING, workers=2, world__min=2, data__pipeline="ray").hold("build").spawn()
    _, slow = run.held("build", num=2)
    run.hold("build", slow)
    run.until(lambda: run.status["standbys"] == 1, "the other")
    assert (
        "1 of at least 2 workers are ready; asked Ray for 2: 1 ready, 1 starting, 0 pending"
        in run.status["reason"]
    )
    run.release("build").at(step=2)
    assert slow in run.members.values()
    assert {actor for node in run.ranks_by_node for actor in nodes.actors_on(node)} == {"Worker"}
    run.terminate()
    run.hold("build").spawn(world__min=1)
    _, slow = run.held("build", num=2)
    run.hold("build", slow).at(step=run.checkpoints[0] + 3)
    assert run.status["world"] == 1
    run.release("build").grow()
    assert slow in run.members.values()
    run.finish()
    assert len(run.events("worker_requested")) == 4
    assert not run.events("worker_start_failed")
    assert run.line == undisturbed(EVERYTHING)
