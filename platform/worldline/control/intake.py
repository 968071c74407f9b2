"""Takes in what workers report: steps to the line, parts to the saves, digests to be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from worldline.control.cluster import Cluster
from worldline.control.comparison import Comparison
from worldline.control.journal import Journal, Progress
from worldline.control.line import Line
from worldline.control.member import Member, MemberState
from worldline.control.membership import Membership
from worldline.control.saves import Saves
from worldline.control.signals import Fetched, StepsFetched
from worldline.events import EvaluationRecord, EventKind, StepRecord
from worldline.tracking.log import EvaluationLog
from worldline.worker.orders import CheckpointPart, GenerationFormed, Met, Notice, Report, StateDigest
from worldline.world import Position

NARRATOR_PERIOD_S = 0.1
OTHERS_PERIOD_S = 0.5
POLL_S = 1.0
LONGEST_POLL_S = 20.0
POLLS_A_SECOND = 200
"""More workers than that are let wait longer for something to tell."""


class Intake:
    """Polls the workers for reports and passes each on to whom it concerns.

    Protocol: `poll` often, with the time; `fetched` and `steps_fetched` with the answers. `expect` says how
    far the line must come: what the narrating rank has not told is asked of all members. `formed` holds the
    newest generation that a member said it trains in.
    """

    def __init__(
        self, cluster: Cluster, line: Line, saves: Saves, evaluations: EvaluationLog, journal: Journal
    ) -> None:
        self._cluster = cluster
        self._line = line
        self._saves = saves
        self._evaluations = evaluations
        self._journal = journal
        self._asked: Counter[str] = Counter()
        self._next: dict[str, float] = {}
        self._expected = 0
        self._filling: dict[str, int] = {}  # worker -> the step after which it was asked for steps
        self._without: dict[str, int] = {}  # worker -> the step after which it had none
        self._next_fill = 0.0
        self._comparison = Comparison()
        self.progress: dict[str, Progress] = {}
        self.formed = 0

    def poll(self, membership: Membership, now: float) -> None:
        workers = [*membership.current, *membership.in_state(MemberState.STANDBY)]
        wait_s = min(max(POLL_S, len(workers) / POLLS_A_SECOND), LONGEST_POLL_S)
        for member in workers:
            if not self._asked[member.id] and now >= self._next.get(member.id, now):
                self._fetch(member.id, POLL_S if member.rank == 0 else wait_s)
        if self._line.lacks(self._expected):
            self._fill(membership.current, now)
        self._comparison.settle([member.id for member in membership.current])

    @property
    def drift(self) -> str:
        """How the members' states differ, once they do."""
        return self._comparison.drift

    def hear(self, ids: list[str]) -> None:
        """Ask at once for what there is, behind a poll that may be under way; `heard` once it is here."""
        for id in ids:
            self._fetch(id, 0.0)

    def heard(self, ids: list[str]) -> bool:
        return not any(self._asked[id] for id in ids)

    def expect(self, step: int) -> None:
        """Some member completed `step`."""
        self._expected = max(self._expected, step)

    def pass_over(self, step: int) -> None:
        """All who computed the missing steps died before they told: better a gap, named, than no log."""
        while self._line.lacks(step):
            first, last = self._line.pass_over(step)
            self._journal.event(
                EventKind.DEGRADED,
                f"steps {first} to {last} are completed, but the workers that could tell of them are lost: "
                "they are missing in the step log",
            )
            self._take_steps([])

    def go_on(self, position: Position, generation: int) -> bool:
        """The next generation begins at `position`. Whether that takes the line back: what this and older
        generations told of beyond it is void, and is done again."""
        self._expected = position.step
        if self._line.newest <= position.step:
            return False
        self._line.rewind(position.step, generation)
        self._evaluations.truncate(position.step)
        return True

    def forget(self, id: str) -> None:
        """The worker is gone; whatever it was asked will not come."""
        self._asked.pop(id, None)
        self._next.pop(id, None)
        self._filling.pop(id, None)
        self._without.pop(id, None)
        self._comparison.forget(id)
        self.progress.pop(id, None)

    def fetched(self, signal: Fetched, member: Member | None, now: float) -> None:
        if member is None:
            return  # it was given up; its generation's reports are not wanted any more
        self._asked[signal.id] -= 1
        self._next[signal.id] = now + (NARRATOR_PERIOD_S if member.rank == 0 else OTHERS_PERIOD_S)
        if signal.reports is None:
            return
        self.progress[signal.id] = Progress(signal.reports.position, signal.reports.phase)
        self._take_steps([item for item in signal.reports.items if isinstance(item, StepRecord)])
        for item in signal.reports.items:
            self._take(item, signal.id)

    def steps_fetched(self, signal: StepsFetched, member: Member | None) -> None:
        after = self._filling.pop(signal.id, None)
        if member is None or after is None or signal.records is None:
            return
        self._take_steps(list(signal.records))
        if self._line.last_step == after:
            self._without[signal.id] = after

    def _fetch(self, id: str, wait_s: float) -> None:
        self._asked[id] += 1
        self._cluster.fetch(id, wait_s)

    def _fill(self, members: Sequence[Member], now: float) -> None:
        """Ask every member for the steps that the line lacks: which of them has them is not known."""
        last = self._line.last_step
        if self._line.lacks(0) and all(self._without.get(member.id) == last for member in members):
            self.pass_over(0)
        if now < self._next_fill:
            return
        self._next_fill = now + NARRATOR_PERIOD_S
        for member in members:
            if member.id not in self._filling:
                self._filling[member.id] = last
                self._cluster.steps_after(member.id, last)

    def _take_steps(self, records: list[StepRecord]) -> None:
        written = self._line.offer(records)
        self._journal.steps(written)
        self._saves.reached(self._line.last_step)
        for record in written:
            if record.skipped:
                self._journal.event(
                    EventKind.NONFINITE, f"the update of step {record.step} was skipped: not finite"
                )

    def _take(self, item: Report, id: str) -> None:
        match item:
            case GenerationFormed():
                self.formed = max(self.formed, item.generation)
            case StateDigest():
                self._comparison.tell(item, id)
            case CheckpointPart():
                self._saves.offer(item)
            case EvaluationRecord():
                self._evaluations.append(item)
            case StepRecord() | Met() | Notice():
                pass
