"""A Ray cluster of several nodes on one machine, and all that can befall a node."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from tests.cluster.forks import Forks
from tests.cluster.link import Link
from tests.cluster.processes import is_alive, kill, signal_all, tree

DEADLINE_S = 60.0
POLL_S = 0.05
STORE_BYTES = 80 * 2**20
QUICKER = {"RAY_health_check_period_ms": "1000"}
"""The head notices after 5 s, not 15, that a node's raylet is gone: the next test waits for it."""
RAYS_OWN = ("_AutoscalingCoordinatorActor", "_StatsActor", "_UsageCollectionActor")
"""Ray Data starts them, once a cluster, beside whoever uses it first; they take nothing and stay."""
WRONG_INTERFACES = ("^lo", "nosuch0", "=eth7")


class Node:
    """A raylet with its agents and workers. id: hexadecimal, as the cluster knows it."""

    def __init__(self, started: Any, link: Link | None, forks: Forks | None) -> None:
        self.started = started
        self._forks = forks
        self.link = link
        self.id: str = started.node_id
        self.raylet: int = started.all_processes["raylet"][0].process.pid
        self.session: str = started.get_session_dir_path()
        self._seen: set[int] = {self.raylet}

    @property
    def pids(self) -> set[int]:
        """All its processes, also those that outlived their raylet."""
        self._seen |= _tree(self.raylet, self._forks)
        return {pid for pid in self._seen if is_alive(pid)}


class Nodes:
    """A head without room for workers, and nodes with room for one each. Each node has another name of a
    network interface in its environment that it does not have.

    Protocol: a test may do to the nodes whatever it likes and leave them like that; `make_whole` ends all
    that is not a plain healthy node and starts others, until there are `num` again.
    """

    def __init__(self, folder: Path, num: int, forks: Forks | None = None, **head: Any) -> None:
        """forks: where the workers come from; without it, each is a program that Ray starts."""
        self.folder = folder
        self._forks = forks
        self._start = forks.node_arguments if forks is not None else {}
        self._environment = {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"} | QUICKER
        if forks is not None:
            self._environment |= forks.environment
        self._num = num
        self._nodes: list[Node] = []
        self._spoiled: set[str] = set()
        with _environment(self._environment):
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "include_dashboard": False,
                    "include_log_monitor": False,
                    "object_store_memory": STORE_BYTES,
                    **self._start,
                    **head,
                },
            )
        self.make_whole()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    @property
    def dashboard(self) -> str:
        return f"http://{self._cluster.webui_url}"

    @property
    def head_id(self) -> str:
        node_id: str = self._head.node_id
        return node_id

    @property
    def _head(self) -> Any:
        return self._cluster.head_node

    @property
    def machine(self) -> str:
        """The address of this machine, where the head is."""
        ip: str = self._head.node_ip_address
        return ip

    def __getitem__(self, node_id: str) -> Node:
        return next(node for node in self._nodes if node.id == node_id)

    def add(
        self, environment: Mapping[str, str] | None = None, link: Link | None = None, **settings: Any
    ) -> Node:
        """Another node, with what its test asks for. environment: of its raylet, so of its workers, too.
        link: its only way to the others.
        """
        node = self._add(environment or {}, link, **settings)
        self._spoiled.add(node.id)
        return node

    def lose(self, node: Node) -> None:
        """The machine is switched off: all its processes end at one moment."""
        self._spoiled.add(node.id)
        pids = node.pids
        kill([node.raylet, *pids])

    def remove(self, node: Node) -> None:
        """Ray's own way to take a node away: SIGTERM, and SIGKILL a second later."""
        self._spoiled.add(node.id)
        node.pids  # noqa: B018  (its workers are found while the raylet is their parent)
        node.started.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)

    def kill_raylet(self, node: Node) -> set[int]:
        """SIGKILL for the raylet alone; returns the processes that it leaves behind."""
        self._spoiled.add(node.id)
        orphans = node.pids - {node.raylet}
        kill([node.raylet])
        return orphans

    def freeze(self, node: Node) -> None:
        """SIGSTOP for all its processes: they keep their connections and say nothing any more."""
        self._spoiled.add(node.id)
        signal_all(signal.SIGSTOP, node.pids)

    def thaw(self, node: Node) -> None:
        signal_all(signal.SIGCONT, node.pids)

    def drain(self, node: Node, deadline_s: float) -> None:
        """What a cloud's notice becomes in Ray. Nobody ends the node at the deadline but the test.

        Private: Ray has no public way to ask for a drain.
        """
        self._spoiled.add(node.id)
        accepted, why = ray._raylet.GcsClient(address=self.address).drain_node(
            node.id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "the scenario takes this node",
            int((time.time() + deadline_s) * 1000),
        )
        assert accepted, why
        # A drain of a node that is gone is accepted, too.
        draining = self._cluster.global_state.get_draining_nodes
        self._until(lambda: node.id in draining(), "the node does not drain")

    def make_whole(self) -> None:
        for node in [node for node in self._nodes if node.id in self._spoiled]:
            self._end(node)
        while len(self._nodes) < self._num:
            wrong = WRONG_INTERFACES[len(self._nodes) % len(WRONG_INTERFACES)]
            self._add({"GLOO_SOCKET_IFNAME": wrong, "NCCL_SOCKET_IFNAME": wrong}, None)
        self._until(lambda: len(self._resources()) == self._num + 1, "the cluster is not whole")

    def check_idle(self) -> None:
        """Nothing of any run is left on the nodes that live: no actor, no group, nothing taken."""

        def left() -> str:
            state = self._cluster.global_state
            actors = [
                actor
                for name in ("ALIVE", "PENDING_CREATION", "RESTARTING", "DEPENDENCIES_UNREADY")
                for actor in state.actor_table(None, None, name).values()
                if actor["ActorClassName"] not in RAYS_OWN
            ]
            groups = [
                group for group in state.placement_group_table().values() if group["state"] != "REMOVED"
            ]
            free, total = state.available_resources(), state.cluster_resources()
            taken = {key: total[key] - free.get(key, 0) for key in ("CPU",) if total[key] != free.get(key, 0)}
            return f"{actors} {groups} {taken}" if actors or groups or taken else ""

        self._until(lambda: not left(), "left on the cluster", left)

    def demand(self) -> list[dict[str, float]]:
        """What waits for room on the cluster, as an autoscaler sees it."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        demands = get_cluster_status(self.address).resource_demands.ray_task_actor_demand
        bundles = [bundle for demand in demands for bundle in demand.bundles_by_count]
        return [bundle.bundle for bundle in bundles for _ in range(bundle.count)]

    def actors_on(self, node_id: str) -> list[str]:
        """Class names of the living actors on a node."""
        actors = self._cluster.global_state.actor_table(None, None, "ALIVE").values()
        return [actor["ActorClassName"] for actor in actors if actor["Address"]["NodeID"] == node_id]

    def lose_workers(self) -> None:
        """All machines but the head's are switched off."""
        for node in self._nodes:
            self.lose(node)

    def lose_all(self) -> None:
        """Every machine of the cluster is switched off."""
        processes = [info.process.pid for infos in self._head.all_processes.values() for info in infos]
        trees = (_tree(pid, self._forks) for pid in processes)
        kill(set().union(*trees, *(node.pids for node in self._nodes)))

    def close(self) -> None:
        for node in list(self._nodes):
            self._end(node)
        with _environment(self._environment):
            self._cluster.shutdown()

    def _add(self, environment: Mapping[str, str], link: Link | None, **settings: Any) -> Node:
        defaults: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, **self._start}
        with _environment(self._environment | environment):
            if link is None:
                started = self._cluster.add_node(**(defaults | settings))
            else:
                defaults["node_ip_address"] = link.address
                try:
                    with link.inside():
                        started = self._cluster.add_node(**(defaults | settings))
                except BaseException:
                    link.close()
                    raise
        node = Node(started, link, self._forks)
        self._nodes.append(node)
        return node

    def _end(self, node: Node) -> None:
        pids = node.pids
        self._cluster.remove_node(node.started, allow_graceful=False)
        kill(pids)
        if node.link is not None:
            node.link.close()
        self._nodes.remove(node)

    def _resources(self) -> dict[str, Any]:
        resources: dict[str, Any] = self._cluster.global_state.total_resources_per_node()
        return resources

    @staticmethod
    def _until(condition: Any, what: str, detail: Any = lambda: "") -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {detail()}"
            time.sleep(POLL_S)


def _tree(pid: int, forks: Forks | None) -> set[int]:
    """A process and its descendants, and if it is a raylet, the workers forked for it and theirs."""
    forked = forks.of_raylet(pid) if forks is not None else ()
    return tree(pid).union(*map(tree, forked))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield
