"""A run on a cluster of several nodes, and the words for what befalls the nodes under it.

run = on_nodes(EVERYTHING, workers=3).start()
run.at(step=5).lose_node(of_rank=1)
run.more(steps=2).add_node()
assert run.grow().finish().line == undisturbed(EVERYTHING)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, Self

from tests.cluster.nodes import Node, Nodes
from tests.cluster.processes import signal_all
from tests.cluster.scenario import Scenario

PACE_S = 0.5


class OnNodes(Scenario):
    """Checks what every scenario checks; who is lost with a node is no survivor."""

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.nodes = nodes
        self._frozen: set[int] = set()

    # What befalls nodes

    def lose_node(self, *ranks: int, of_rank: int | None = None) -> Self:
        """The nodes of these ranks are switched off, all at the same time."""
        return self._each(self.nodes.lose, ranks, of_rank)

    def remove_node(self, *ranks: int, of_rank: int | None = None) -> Self:
        return self._each(self.nodes.remove, ranks, of_rank)

    def kill_raylet(self, of_rank: int) -> Self:
        """SIGKILL for the raylet; the worker lives on and does not know."""
        self._each(self.nodes.kill_raylet, (), of_rank)
        return self

    def freeze_node(self, of_rank: int) -> Self:
        return self._each(self.nodes.freeze, (), of_rank)

    def pull_link(self, of_rank: int) -> Self:
        """The cable of the node is pulled: nobody gets a reset."""

        def pull(node: Node) -> None:
            assert node.link is not None, "this rank is on a node without a link of its own"
            node.link.pull()

        return self._each(pull, (), of_rank)

    def drain_node(self, of_rank: int, deadline_s: float) -> Self:
        """Ray is told that the node will go; it stays until the test takes it."""
        self.lose({self.members[of_rank]})
        self.nodes.drain(self.node(of_rank), deadline_s)
        return self

    def add_node(self, **settings: Any) -> Self:
        self.nodes.add(**settings)
        return self

    def trickle(self, done: Callable[[], bool], what: str, within: float) -> Self:
        """Let a step complete now and then until it is done: when that is decided, only the run knows."""
        deadline = time.monotonic() + within
        while not done():
            left = deadline - time.monotonic()
            self.until(lambda: done() or self._held() is not None, what, within=max(left, 0))
            self.open(self._gate_step() + 1)
            time.sleep(PACE_S)
        return self

    # What befalls workers

    def freeze(self, rank: int) -> Self:
        """SIGSTOP for the worker alone."""
        return self.freeze_processes(self.members[rank])

    def freeze_processes(self, *pids: int) -> Self:
        self.lose(pids)
        self._frozen |= set(pids)
        signal_all(signal.SIGSTOP, pids)
        return self

    def thaw(self) -> Self:
        """SIGCONT for all that were frozen."""
        signal_all(signal.SIGCONT, self._frozen)
        self._frozen.clear()
        return self

    # What is there to see

    def node(self, of_rank: int) -> Node:
        [worker] = [worker for worker in self.status["workers"] if worker["rank"] == of_rank]
        return self.nodes[worker["node"]]

    @property
    def ranks_by_node(self) -> dict[str, int]:
        return {worker["node"]: worker["rank"] for worker in self.status["workers"]}

    def _each(self, befall: Any, ranks: tuple[int, ...], of_rank: int | None) -> Self:
        chosen = ranks if of_rank is None else (of_rank,)
        nodes = [self.node(rank) for rank in chosen]
        for node in nodes:
            self._processes.note(node.pids & set(self.members.values()))
        self.lose({self.members[rank] for rank in chosen})
        for node in nodes:
            befall(node)
        return self
