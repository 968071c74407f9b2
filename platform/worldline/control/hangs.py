"""A generation that stands still: how long it may, and what is done when it is known who holds it up."""

from __future__ import annotations

from collections import Counter

from worldline.control.cluster import Cluster
from worldline.control.decisions import Condemn, Inquire, Limits
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.line import Line
from worldline.control.sensors import Sensors
from worldline.events import EventKind
from worldline.health.hang import deadline


class Hangs:
    """Protocol: `patience_s` before each decision; `inquire` and `condemn` carry out what was decided."""

    def __init__(
        self, sensors: Sensors, cluster: Cluster, intake: Intake, line: Line, journal: Journal
    ) -> None:
        self._sensors = sensors
        self._cluster = cluster
        self._intake = intake
        self._line = line
        self._journal = journal
        self._declared: Counter[int] = Counter()  # completed steps -> hangs declared there

    def patience_s(self, limits: Limits) -> float:
        """How long the generation may stand still: a multiple of a step's usual time, once it is known. A
        step that is only slow is completed in the end, as each hang declared at it doubles the time.
        """
        membership, progress = self._sensors.membership, self._intake.progress
        declared = self._declared[membership.furthest.step]
        evaluates = any(m.id in progress and progress[m.id].phase == "evaluate" for m in membership.current)
        if self._intake.formed < membership.generation or evaluates:
            return limits.timeout_s * float(2 ** min(declared, 64))
        return deadline(self._line.recent_s, limits.timeout_s, declared, least_s=limits.hang_s)

    def inquire(self, inquire: Inquire) -> None:
        """The answers come as signals."""
        membership = self._sensors.membership
        for id in inquire.ids:
            self._cluster.inquire(id, membership.generation)
        self._sensors.membership = membership.inquired(inquire.ids, self._sensors.clock())

    def condemn(self, condemn: Condemn, now: float) -> None:
        """Who is to blame goes; if nobody is, all must form the next generation anew."""
        sensors, membership = self._sensors, self._sensors.membership
        self._journal.event(
            EventKind.HANG,
            f"{condemn.diagnosis}\n{condemn.accounts}",
            workers=list(condemn.reasons),
            seconds=now - membership.moved,
        )
        self._declared[membership.furthest.step] += 1
        if condemn.alive:
            sensors.budget = sensors.budget.after_hang(condemn.diagnosis)
        for id, reason in condemn.reasons.items():
            sensors.lose(id, reason)
        if not condemn.reasons:
            ids = [m.id for m in membership.training if m.asked is None]
            for id in ids:
                self._cluster.abandon(id, membership.generation)
            sensors.membership = membership.asked_to_abandon(ids, condemn.diagnosis, now)
