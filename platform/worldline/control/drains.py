"""Nodes that Ray drains: the only file that asks, by Ray's private names.

A drain is a node's announced end: a spot notice, a pod's deletion, the autoscaler's choice. Ray places
nothing new there and leaves the actors alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import ray

from worldline.control.signals import Degraded, NodeDraining

POLL_S = 0.5
LONGEST_S = 120.0
SHORTEST_S = 5.0
REQUEST_S = 10.0
DEAF_S = 10.0
PREEMPTION = 2
"""`DRAIN_NODE_REASON_PREEMPTION` of Ray's protocol: the node may not refuse."""


class ApiMoved(RuntimeError):
    """This version of Ray lacks a private name that is needed here."""


class Drains:
    """Posts every new drain once, from a thread of its own, between `with` and its end.

    A drain with another deadline is a new one. What Ray cannot answer is asked again; that it does not for
    DEAF_S is posted, too. Raises
    ApiMoved if this version of Ray knows no drains under the names used here.
    """

    def __init__(
        self,
        post: Callable[[NodeDraining | Degraded], None],
        ask: Callable[[], Mapping[str, int]] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._post = post
        self._ask = ask if ask is not None else _asker()
        self._wall_clock = wall_clock
        self._seen: dict[str, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drains", daemon=True)

    def __enter__(self) -> Drains:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(REQUEST_S)

    def look(self) -> None:
        """Ask once and post what is new."""
        now = dict(self._ask())
        for node, deadline_ms in now.items():
            if self._seen.get(node) != deadline_ms:
                left_s = time_left(deadline_ms, self._wall_clock())
                self._post(NodeDraining(node, left_s, f"Ray drains node {node[:8]}"))
        self._seen = now

    def _watch(self) -> None:
        failed_since: float | None = None
        while not self._closed.wait(POLL_S):
            try:
                self.look()
                failed_since = None
            except Exception as error:
                now = self._wall_clock()
                failed_since = now if failed_since is None else failed_since
                if now - failed_since >= DEAF_S:
                    failed_since = float("inf")  # said once, until it was well again
                    self._post(Degraded(f"Ray does not say which nodes it drains: {_first_line(error)}"))


def time_left(deadline_ms: int, now_s: float) -> float:
    """Seconds that a node which was told to end by `deadline_ms` has left. 0 is no deadline.

    The deadline is by the clock of whatever asked for the drain, `now_s` by ours, and the two may differ by
    minutes. So it is not taken at its word: it can only shorten LONGEST_S, the longest notice that a cloud
    gives, and not below SHORTEST_S, as a deadline that is over when one first hears of it rather tells of a
    clock that is wrong. An error either way costs little: who is to leave does so at once, and this bounds
    only how long what it still writes is waited for.
    """
    if deadline_ms <= 0:
        return LONGEST_S
    return min(max(deadline_ms / 1000 - now_s, SHORTEST_S), LONGEST_S)


def drain_node(node_id: str, lead_s: float, reason: str = "worldline drain") -> None:
    """Announce the end of a node in `lead_s` seconds, as for a spot machine that is taken back.

    Raises LookupError if Ray does not drain it after all, as it says nothing of nodes that are gone.
    """
    worker: Any = ray._private.worker.global_worker
    client: Any = getattr(worker, "gcs_client", None)
    if not hasattr(client, "drain_node"):
        raise ApiMoved(_moved("GcsClient.drain_node"))
    deadline_ms = int((time.time() + lead_s) * 1000)
    accepted, why = client.drain_node(node_id, PREEMPTION, reason, deadline_ms, timeout=REQUEST_S)
    if not accepted:
        raise LookupError(f"Ray refuses to drain node {node_id}: {why}")
    if node_id not in _asker()():
        raise LookupError(f"Ray does not drain node {node_id}: is it gone?")


def _asker() -> Callable[[], Mapping[str, int]]:
    """What gives the hex ids of all nodes that are being drained, with their deadlines."""
    state: Any = getattr(ray._private, "state", None)
    ask: Callable[[], Mapping[str, int]] | None = getattr(
        getattr(state, "state", None), "get_draining_nodes", None
    )
    if ask is None:
        raise ApiMoved(_moved("state.get_draining_nodes"))
    return ask


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _moved(name: str) -> str:
    return (
        f"Ray {ray.__version__} has no {name}, by which drains of nodes are known: "
        "use Ray 2.60, or adapt control/drains.py"
    )
