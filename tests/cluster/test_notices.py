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

WITHIN_S = 8.0


@pytest.mark.xfail(strict=True, reason="Ray's drain is not heard")
def test_a_drained_node(on_nodes, undisturbed) -> None:
    run = on_nodes(EVERYTHING).start().at(step=5)
    node, pid = run.node(of_rank=1), run.members[1]
    run.drain_node(of_rank=1, deadline_s=30).open(step=9)
    run.until(lambda: run.status["world"] == 2, "the smaller world", within=WITHIN_S)
    run.at(step=9).until(lambda: not is_alive(pid), "the worker's end", within=WITHIN_S)
    assert node.pids
    run.nodes.lose(node)
    run.add_node().grow().finish()
    assert not run.events("worker_lost")
    assert all(times == 1 for rows in run.seen.values() for times in rows.values())
    assert run.line == undisturbed(EVERYTHING)


@pytest.mark.xfail(strict=True, reason="Ray's drain is not heard")
def test_all_nodes_are_drained(on_nodes, undisturbed) -> None:
    run = on_nodes(EVERYTHING, workers=2, checkpoint__every_steps=1000).start().at(step=25)
    for rank in run.members:
        run.drain_node(of_rank=rank, deadline_s=30)
    run.open(step=27).until(lambda: bool(run.checkpoints), "a checkpoint", within=WITHIN_S)
    assert run.checkpoints[0] >= 25
    run.lose_node(*run.members)
    run.finish()
    assert run.line == undisturbed(EVERYTHING)


@pytest.mark.xfail(strict=True, reason="Ray has the worker finish its call first, which lasts: it trains on")
def test_a_worker_is_told_to_end(on_nodes, undisturbed) -> None:
    """SIGTERM to a worker's process."""
    run = on_nodes(EVERYTHING, checkpoint__every_steps=1000).start().at(step=25)
    told = run.members[2]
    run.lose({told})
    signal_all(signal.SIGTERM, [told])
    run.open(step=27).until(lambda: run.status["world"] == 2, "the smaller world", within=WITHIN_S)
    run.until(lambda: not is_alive(told), "its end", within=WITHIN_S)
    run.finish()
    assert not run.events("restored")
    assert run.line == undisturbed(EVERYTHING)
