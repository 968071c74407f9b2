"""Nodes go, come back, fall silent: the others go on where they were, and the line stays the same.

| what must hold | report |
| --- | --- |
| a node is lost, taken away, or only its raylet dies | A2 |
| what is frozen and passed by cannot write, nor hold up a generation that it comes too late for | F8, F7 |
| the children of a worker end with it, before the next one starts | F8 |
| a node whose link goes down, so that nobody gets a reset | A8 |
"""

from __future__ import annotations

import pytest
from tests.cluster.cases import EVERYTHING
from tests.cluster.link import link_or_skip
from tests.cluster.processes import is_alive, tree

pytestmark = pytest.mark.cluster

SILENCE_S = 30.0
"""Far less than the peers' own timeout, far more than it takes on a machine that has time."""
CHILDREN_S = 20.0


def test_nodes_go_and_come(on_nodes, undisturbed) -> None:
    """Switched off; taken away in order; two at the same time. Others come, and the world grows again."""
    run = on_nodes(EVERYTHING).start()
    run.at(step=5).lose_node(of_rank=1)
    run.more(steps=2)
    assert run.status["world"] == 2
    run.add_node().grow()
    run.more(steps=1).remove_node(of_rank=0)
    run.more(steps=2)
    assert run.status["world"] == 2
    run.add_node().grow()
    run.more(steps=1).lose_node(0, 2)
    run.more(steps=3)
    assert run.status["world"] == 1
    run.finish()
    assert not run.events("restored")
    assert run.line == undisturbed(EVERYTHING)


def test_a_raylet_dies_alone(on_nodes, undisturbed) -> None:
    """Its worker lives on, and is about to write its part of a checkpoint. It is given up, and ended."""
    run = on_nodes(EVERYTHING, checkpoint__every_steps=20).start().at(step=19)
    zombie = run.members[1]
    run.hold("state-20", zombie).open(step=20).held("state-20")
    run.kill_raylet(of_rank=1).at(step=22)
    assert run.status["world"] == 2
    run.until(lambda: not is_alive(zombie), "the end of the worker without a raylet")
    run.release("state-20").finish()
    assert run.checkpoints == [20, 40]
    assert not run.events("restored")
    assert run.line == undisturbed(EVERYTHING)


def test_what_was_frozen_and_passed_by_cannot_write(on_nodes, undisturbed) -> None:
    """A newcomer stands still while it receives the state; later a member, before it writes its part of a
    checkpoint, which the others write without it. Both come back too late.
    """
    run = on_nodes(EVERYTHING, checkpoint__every_steps=20).start().at(step=5)
    run.kill(rank=1).more(steps=1)
    [late] = run.hold("load").joiners().lead_to("load")
    run.freeze_processes(late).release("load").more(steps=1)
    assert run.status["world"] == 2
    run.thaw().grow().at(step=19)
    assert late not in run.members.values()
    late = run.members[2]
    run.hold("state-20", late).open(step=20).held("state-20")
    run.freeze(rank=2).release("state-20").at(step=22)
    run.until(lambda: run.checkpoints == [20], "the checkpoint without it")
    before = run.manifest(20)
    run.thaw().more(steps=3)
    assert run.manifest(20) == before
    assert late not in run.members.values()
    run.finish()
    assert run.line == undisturbed(EVERYTHING)


def test_a_silent_node(on_nodes, nodes, undisturbed) -> None:
    """Its link is pulled; then another is frozen. Nobody gets a reset, and nobody waits for `timeout_s`. When
    they are back, their workers find that they were given up, and end.
    """
    linked = nodes.add(link=link_or_skip(nodes.machine))
    run = on_nodes(EVERYTHING, workers=4).start()
    run.at(step=5).pull_link(of_rank=run.ranks_by_node[linked.id])
    run.more(steps=2, within=SILENCE_S)
    assert run.status["world"] == 3
    frozen = run.node(of_rank=0)
    run.freeze_node(of_rank=0).more(steps=2, within=SILENCE_S)
    assert run.status["world"] == 2
    nodes.thaw(frozen)
    linked.link.plug()
    run.finish()
    assert not run.events("restored")
    assert run.line == undisturbed(EVERYTHING)


@pytest.mark.parametrize("what", ["worker", "raylet"])
def test_children_end_with_their_worker(on_nodes, undisturbed, what: str) -> None:
    """The next worker on the node gets what the child held; no child is left in the end."""
    run = on_nodes(EVERYTHING, workers=2, task__class="tiny:Parent").start().at(step=5)
    children = tree(run.members[1]) - {run.members[1]}
    assert children
    if what == "worker":
        run.kill(rank=1).more(steps=2).grow()
    else:
        run.kill_raylet(of_rank=1).more(steps=2)
    run.until(lambda: not any(map(is_alive, children)), "the end of the children", within=CHILDREN_S)
    run.finish()
    assert not run.events("worker_start_failed")
    assert run.line == undisturbed(EVERYTHING)
