"""As many workers asked for as are wanted, where they may be: what an autoscaler sees as the demand."""

from __future__ import annotations

from worldline.control import planner
from worldline.control.cluster import Cluster
from worldline.control.decisions import Limits
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.member import MemberState
from worldline.control.sensors import Sensors
from worldline.events import EventKind

SETTLE_S = 1.0
"""A new generation has at least this long before more workers are asked for."""
RECYCLE_S = 120.0
"""Within which a worker that is to be replaced leaves; there is no hurry."""


class Staffing:
    """Protocol: `top_up` whenever there is nothing more urgent to do; `settle` when a generation was formed;
    `below_min_since` before each decision.
    """

    def __init__(self, sensors: Sensors, cluster: Cluster, intake: Intake, journal: Journal) -> None:
        self._sensors = sensors
        self._cluster = cluster
        self._intake = intake
        self._journal = journal
        self._below_min_since: float | None = None
        self._avoided: frozenset[str] = frozenset()

    def below_min_since(self, limits: Limits, now: float) -> float:
        """Since when there have been fewer than min ready workers; now, if there are enough."""
        membership = self._sensors.membership
        ready = len(membership.current) + len(membership.in_state(MemberState.STANDBY))
        if ready >= limits.min:
            self._below_min_since = None
        elif self._below_min_since is None:
            self._below_min_since = now
        return now if self._below_min_since is None else self._below_min_since

    def settle(self, now: float) -> None:
        self._sensors.request_from = max(self._sensors.request_from, now + SETTLE_S)

    def _recycle(self, limits: Limits) -> None:
        """A group that was given up cannot be freed: a worker that keeps many is replaced, one at a time, and
        only while the world is whole, or has one to spare and nobody is on the way into it.
        """
        membership = self._sensors.membership
        current = membership.current
        coming = membership.in_state(MemberState.STARTING) or membership.in_state(MemberState.STANDBY)
        if len(current) < limits.max and (len(current) <= limits.min or coming):
            return
        worn = [m for m in current if m.generations >= limits.generations_a_worker]
        if worn and not any(m.drain for m in current):
            oldest = max(worn, key=lambda m: m.generations)
            reason = f"it has been in {oldest.generations} generations and keeps the connections of each"
            self._sensors.drain([oldest.id], RECYCLE_S, reason)

    def top_up(self, limits: Limits, now: float) -> int:
        """Returns how many were missing and are asked for. None is while something is more urgent: between a
        failure and the next generation, and in its first moments, as a process that starts would compete with
        its first step.
        """
        sensors = self._sensors
        membership = sensors.membership
        under_way = membership.trouble or self._intake.formed < membership.generation
        if sensors.stop is not None or (membership.training and under_way) or now < sensors.request_from:
            return 0
        # Better a node that failed than too few workers.
        below_min = self._below_min_since is not None
        avoid = sensors.cooling.closed if below_min else sensors.cooling.avoided(now)
        if avoid != self._avoided:
            # They were asked for with other nodes in view.
            sensors.let_go([m.id for m in membership.in_state(MemberState.REQUESTED)])
            self._avoided = avoid
        self._recycle(limits)
        missing = planner.missing(sensors.membership, limits)
        elsewhere = f"not on node {', '.join(sorted(avoid))}, drained or cooling" if avoid else ""
        for _ in range(missing):
            id = self._cluster.request(avoid)
            sensors.membership = sensors.membership.requested(id, now)
            self._journal.event(EventKind.WORKER_REQUESTED, elsewhere, workers=[id])
        return missing
