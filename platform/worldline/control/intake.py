"""Takes in what workers report: steps to the line, parts to the saves, digests to be compared."""

from __future__ import annotations

from worldline.control.cluster import Cluster
from worldline.control.journal import Journal, Progress
from worldline.control.line import Line
from worldline.control.membership import Member, Membership
from worldline.control.saves import Saves
from worldline.control.signals import Fetched, StepsFetched
from worldline.events import EvaluationRecord, EventKind, StepRecord
from worldline.tracking.log import EvaluationLog
from worldline.worker.orders import CheckpointPart, GenerationFormed, Report, StateDigest

NARRATOR_PERIOD_S = 0.1
OTHERS_PERIOD_S = 0.5
POLL_S = 1.0


class Intake:
    """Polls the members for reports and passes each on to whom it concerns.

    Protocol: `poll` often, with the time; `fetched` and `steps_fetched` with the answers. `formed` holds the
    newest generation that a member said it trains in; `drift` says how members differ, once they do.
    """

    def __init__(
        self, cluster: Cluster, line: Line, saves: Saves, evaluations: EvaluationLog, journal: Journal
    ) -> None:
        self._cluster = cluster
        self._line = line
        self._saves = saves
        self._evaluations = evaluations
        self._journal = journal
        self._asked: set[str] = set()
        self._next: dict[str, float] = {}
        self._filling: set[str] = set()
        self._digests: dict[int, dict[str, str]] = {}
        self.progress: dict[str, Progress] = {}
        self.formed = 0
        self.drift = ""

    def poll(self, membership: Membership, now: float, *, at_once: bool = False) -> None:
        for member in membership.current:
            if member.id not in self._asked and (at_once or now >= self._next.get(member.id, 0.0)):
                self._asked.add(member.id)
                self._cluster.fetch(member.id, 0.0 if at_once else POLL_S)

    def forget(self, id: str) -> None:
        """The worker is gone; whatever it was asked will not come."""
        for of_workers in (self._asked, self._filling):
            of_workers.discard(id)
        self._next.pop(id, None)
        self.progress.pop(id, None)

    def fetched(self, signal: Fetched, member: Member | None, now: float) -> None:
        self._asked.discard(signal.id)
        narrates = member is not None and member.rank == 0
        self._next[signal.id] = now + (NARRATOR_PERIOD_S if narrates else OTHERS_PERIOD_S)
        if signal.reports is None:
            return
        self.progress[signal.id] = Progress(signal.reports.position, signal.reports.phase)
        steps = [item for item in signal.reports.items if isinstance(item, StepRecord)]
        self._take_steps(steps)
        for item in signal.reports.items:
            self._take(item, signal.id)
        if self._line.lacks(0):
            self.fill(signal.id)

    def fill(self, id: str) -> None:
        """Ask a member for all steps that the line lacks."""
        if id not in self._filling:
            self._filling.add(id)
            self._cluster.steps_after(id, self._line.last_step)

    def steps_fetched(self, signal: StepsFetched) -> None:
        self._filling.discard(signal.id)
        self._take_steps(list(signal.records))

    def _take_steps(self, records: list[StepRecord]) -> None:
        written = self._line.offer(records)
        self._journal.steps(written)
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
                self._compare(item, id)
            case CheckpointPart():
                self._saves.offer(item)
            case EvaluationRecord():
                self._evaluations.append(item)
            case StepRecord():
                pass

    def _compare(self, said: StateDigest, id: str) -> None:
        of_step = self._digests.setdefault(said.step, {})
        of_step[id] = said.digest
        if len(set(of_step.values())) > 1 and not self.drift:
            parts = ", ".join(f"{worker}: {digest[:12]}" for worker, digest in sorted(of_step.items()))
            self.drift = f"the members' states differ after step {said.step} ({parts})"
        for step in sorted(self._digests)[:-8]:
            del self._digests[step]
