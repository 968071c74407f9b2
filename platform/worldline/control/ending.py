"""The end of an attempt: bring home what the members still hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from worldline.control.cluster import Cluster
from worldline.control.intake import Intake
from worldline.control.line import Line
from worldline.control.saves import Saves
from worldline.control.sensors import PULSE_S, Sensors
from worldline.control.signals import SaveEnded
from worldline.exits import FAILED, TRY_AGAIN
from worldline.tracking.status import RunState
from worldline.world import Position

ANSWER_S = 30.0
SAVE_S = 600.0
SAVE_TRIES = 3


@dataclass(frozen=True)
class Conclusion:
    """How the run ended for this driver."""

    state: RunState
    reason: str
    exit_code: int


class Ending:
    """Called once, when no member trains any more or none shall be heard.

    Those who hold the truth tell the steps they have not told yet and write their state, unless it is
    durable. Whoever dies meanwhile is left out; the others hold the same. A state that is not home in the end
    makes the conclusion a worse one.
    """

    def __init__(
        self,
        sensors: Sensors,
        cluster: Cluster,
        intake: Intake,
        line: Line,
        saves: Saves,
        clock: Callable[[], float],
    ) -> None:
        self._sensors = sensors
        self._cluster = cluster
        self._intake = intake
        self._line = line
        self._saves = saves
        self._clock = clock

    def conclude(self, conclusion: Conclusion) -> Conclusion:
        held = [m.position for m in self._sensors.membership.current if m.position is not None]
        truth = max(held, default=None)
        if truth is None or not self._may_write() or self._intake.drift:
            return conclusion
        self._hear_out(truth)
        own_save = conclusion.state is RunState.FINISHED and self._wrote_at_the_end(truth)
        ended = self._save(truth, own_save)
        if not self._may_write():
            return Conclusion(RunState.STOPPED, self._sensors.lease_lost, TRY_AGAIN)
        if self._durable(truth):
            return conclusion
        what = conclusion.reason or conclusion.state.lower()
        if ended is None and not self._holders(truth):
            return replace(
                conclusion,
                state=RunState.STOPPED if conclusion.state is RunState.FINISHED else conclusion.state,
                reason=f"{what}, but all workers that held the state of step {truth.step} died before it was "
                "saved: the steps since the newest checkpoint are to be done again",
                exit_code=conclusion.exit_code or TRY_AGAIN,
            )
        why = ended.error if ended is not None else f"no answer within {SAVE_S:g} s"
        return Conclusion(
            RunState.FAILED, f"{what}, but the state of step {truth.step} is not saved: {why}", FAILED
        )

    def _hear_out(self, truth: Position) -> None:
        """Until the holders have told all that they had when they ended, and the line is complete."""
        deadline = self._clock() + ANSWER_S
        self._intake.expect(truth.step)
        self._intake.hear(self._holders(truth))
        self._listen_until(
            lambda: self._intake.heard(self._holders(truth)) and not self._line.lacks(truth.step),
            truth,
            deadline,
        )
        if self._holders(truth) and self._may_write():
            self._intake.pass_over(truth.step)

    def _save(self, truth: Position, own_save: bool) -> SaveEnded | None:
        """Have the holders write their state unless it is durable. Returns how the last try ended, if it did.

        own_save: whether they are about to without being told.
        """
        generation = self._sensors.membership.generation
        if self._sensors.membership.lost:
            self._saves.forget(generation)
        if self._save_ended(truth) is not None:
            own_save = False  # it has failed
        for _ in range(SAVE_TRIES):
            holders = self._holders(truth)
            if self._durable(truth) or not holders:
                break
            self._sensors.last_save = None
            if not own_save and not self._saves.pending(truth.step):
                # A number of its own for each try: parts of two saves of a step must never mix.
                generation += 1
                for part, id in enumerate(holders):
                    self._cluster.write_checkpoint(id, generation, part, len(holders))
            own_save = False
            if not self._wait_for_save(truth, holders, self._clock() + SAVE_S):
                self._saves.forget(generation)
        return self._save_ended(truth)

    def _wait_for_save(self, truth: Position, holders: list[str], deadline: float) -> bool:
        """Whether it ended; False if one of the holders died or the time is over."""
        self._listen_until(
            lambda: self._save_ended(truth) is not None or self._holders(truth) != holders, truth, deadline
        )
        return self._save_ended(truth) is not None

    def _listen_until(self, done: Callable[[], bool], truth: Position, deadline: float) -> None:
        while not done() and self._holders(truth) and self._may_write():
            now = self._clock()
            if now >= deadline:
                return
            for member in self._sensors.membership.current:
                if member.suspicion is not None and now >= member.suspicion.deadline:
                    self._sensors.lose(member.id, member.suspicion.reason)
            self._sensors.listen(min(now + PULSE_S, deadline))

    def _wrote_at_the_end(self, truth: Position) -> bool:
        """Whether the generation came to the line's end itself, where each member writes its part unasked."""
        membership = self._sensors.membership
        return not membership.lost and membership.position.step < truth.step

    def _save_ended(self, truth: Position) -> SaveEnded | None:
        ended = self._sensors.last_save
        return ended if ended is not None and ended.step >= truth.step else None

    def _durable(self, truth: Position) -> bool:
        return truth.step == 0 or self._saves.committed >= truth.step

    def _may_write(self) -> bool:
        return not self._sensors.lease_lost

    def _holders(self, truth: Position) -> list[str]:
        return [m.id for m in self._sensors.membership.current if m.position == truth]
