"""A node is about to go and says so: the workers leave before, and nothing of what they did is lost.

| what must hold | report |
| --- | --- |
| a drained node's worker leaves at a step border, long before the deadline; nothing is done again | F13, C2 |
| all are told to go: a checkpoint first, however rare checkpoints are | F13 |
"""

from __future__ import annotations

import signal

import pytest
from tests.cluster.cases import EVERYTHING
from tests.cluster.processes import is_alive, signal_all

pytestmark = pytest.mark.cluster

WITHIN_S = 20.0


def test_a_drained_node(on_nodes, undisturbed) -> None:
    """There is room for another worker: it takes the place at once."""
    run = on_nodes(EVERYTHING, workers=2).start().at(step=5)
    node, leaving = run.node(of_rank=1), run.members[1]
    run.drain_node(of_rank=1, deadline_s=120)
    run.until(lambda: run.status["standbys"] == 1, "another worker")
    run.trickle(lambda: leaving not in run.members.values(), "its leave", within=WITHIN_S)
    run.until(lambda: not is_alive(leaving), "the worker's end", within=WITHIN_S)
    assert run.status["world"] == 2
    run.nodes.lose(node)
    run.finish()
    assert not run.events("worker_lost")
    assert all(times == 1 for rows in run.seen.values() for times in rows.values())
    assert run.line == undisturbed(EVERYTHING)


def test_all_nodes_are_drained(on_nodes, undisturbed) -> None:
    """Nobody is there to take over: the state is saved before the last one leaves."""
    run = on_nodes(EVERYTHING, checkpoint__every_steps=1000).start().at(step=5)
    for rank in run.members:
        run.drain_node(of_rank=rank, deadline_s=14)
    run.trickle(lambda: bool(run.checkpoints), "a checkpoint", within=WITHIN_S)
    saved = run.steps
    assert run.checkpoints == [len(saved)]
    run.nodes.lose_workers()
    run.add_node().until(lambda: bool(run.events("restored")), "another worker")
    run.finish()
    assert run.steps[: len(saved)] == saved
    assert not run.events("worker_lost")
    assert run.line == undisturbed(EVERYTHING)


def test_a_worker_is_told_to_end(on_nodes, undisturbed) -> None:
    """SIGTERM to a worker's process."""
    run = on_nodes(EVERYTHING, workers=2, checkpoint__every_steps=1000).start().at(step=5)
    told = run.members[1]
    run.lose({told})
    signal_all(signal.SIGTERM, [told])
    run.trickle(lambda: told not in run.members.values(), "its leave", within=WITHIN_S)
    run.until(lambda: not is_alive(told), "its end", within=WITHIN_S)
    run.finish()
    assert not run.events("restored")
    assert not run.events("worker_lost")
    assert run.line == undisturbed(EVERYTHING)
