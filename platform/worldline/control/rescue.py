"""The state that leaves with the last who hold it: written while there is time."""

from __future__ import annotations

from worldline.control.cluster import Cluster
from worldline.control.decisions import Save
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.saves import Saves
from worldline.control.sensors import PULSE_S, Sensors
from worldline.tracking.status import RunState

AGAIN_S = 1.0
"""At least so long lies between two tries."""


class Rescue:
    """Protocol: `save` as often as the planner says so. It has the holders write once, and once more when
    there are other holders than before, or when it failed.
    """

    def __init__(
        self, sensors: Sensors, cluster: Cluster, intake: Intake, saves: Saves, journal: Journal
    ) -> None:
        self._sensors = sensors
        self._cluster = cluster
        self._intake = intake
        self._saves = saves
        self._journal = journal
        self._ordered: tuple[int, tuple[str, ...]] = (0, ())  # number and writers of the newest try
        self._again_from = 0.0

    def save(self, save: Save, now: float) -> float:
        """Returns when to look again."""
        step = save.position.step
        self._journal.state(RunState.DRAINING, f"saving the state of step {step}")
        if now >= self._again_from and not self._under_way(save):
            # Those who were to write the rest may be gone: what is there of it is never whole.
            self._saves.forget(self._sensors.membership.generation)
            if not self._saves.pending(step):
                self._order(save, now)
        return min(save.until, now + PULSE_S)

    def _under_way(self, save: Save) -> bool:
        sensors, step = self._sensors, save.position.step
        failed = sensors.last_save is not None and sensors.last_save.step == step and sensors.last_save.error
        if self._ordered == (sensors.membership.generation, save.ids):
            return not failed
        # Its members may be writing it without being told.
        return self._saves.pending(step) and not sensors.membership.lost and not failed

    def _order(self, save: Save, now: float) -> None:
        sensors = self._sensors
        sensors.membership = sensors.membership.renumbered()
        sensors.last_save = None
        number = sensors.membership.generation
        self._ordered, self._again_from = (number, save.ids), now + AGAIN_S
        self._intake.expect(save.position.step)
        for part, id in enumerate(save.ids):
            self._cluster.write_checkpoint(id, number, part, len(save.ids))
