"""Reports go to whom they concern; what the teller did not say is asked of all."""

import pytest
from tests.unit.fake_cluster import SilentConsole, record, status

from worldline.control.intake import NARRATOR_PERIOD_S, OTHERS_PERIOD_S, Intake
from worldline.control.journal import Journal
from worldline.control.line import Line
from worldline.control.membership import Membership
from worldline.control.signals import Fetched, StepsFetched
from worldline.events import EvaluationRecord, EventKind
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, EvaluationLog, EventLog, StepLog
from worldline.tracking.status import RunState, StatusWriter
from worldline.worker.orders import GenerationFormed, Hello, Reports, StateDigest
from worldline.world import Position

HELLO = Hello(1, "node", "10.0.0.1", {})


class Asked:
    """A cluster that only notes what it was asked."""

    def __init__(self):
        self.fetched, self.steps = [], []

    def fetch(self, id, wait_s):
        self.fetched.append(id)

    def steps_after(self, id, step):
        self.steps.append((id, step))

    def take(self):
        asked, self.fetched = self.fetched, []
        return asked


class NoSaves:
    def __init__(self):
        self.parts, self.step = [], None

    def offer(self, part):
        self.parts.append(part)

    def reached(self, step):
        self.step = step


class Bench:
    def __init__(self, folder):
        self.cluster, self.saves, self.console = Asked(), NoSaves(), SilentConsole()
        self.logs = [StepLog(folder / STEPS), EvaluationLog(folder / EVALUATIONS), EventLog(folder / EVENTS)]
        self.journal = Journal(status(), self.logs[2], StatusWriter(folder), self.console)
        self.line = Line(self.logs[0])
        self.intake = Intake(self.cluster, self.line, self.saves, self.logs[1], self.journal)
        self.members = Membership()
        for id in ("a", "b", "c"):
            self.members = self.members.requested(id, 0.0).ready(id, HELLO, 0.0)
        self.members = self.members.formed(["a", "b"], Position(0), 0.0)

    def answer(self, id, *items, now=0.0):
        reports = Reports(items, Position(0), "compute")
        self.intake.fetched(Fetched(id, reports), self.members.members.get(id), now)

    def fill(self, id, *records):
        self.intake.steps_fetched(StepsFetched(id, records), self.members.members.get(id))

    def close(self):
        self.journal.close(RunState.STOPPED, "", "")
        for log in self.logs:
            log.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_each_is_asked_once_at_a_time_and_the_teller_most_often(bench):
    intake, cluster = bench.intake, bench.cluster
    intake.poll(bench.members, 0.0)
    assert cluster.take() == ["a", "b", "c"], "a standby, too: so its death is noticed"
    intake.poll(bench.members, 100.0)
    assert cluster.take() == []
    bench.answer("a", now=100.0)
    bench.answer("b", now=100.0)
    intake.poll(bench.members, 100.0 + NARRATOR_PERIOD_S)
    assert cluster.take() == ["a"]
    intake.poll(bench.members, 100.0 + OTHERS_PERIOD_S)
    assert cluster.take() == ["b"]


def test_no_answer_is_no_report_and_the_next_poll_comes(bench):
    bench.intake.poll(bench.members, 0.0)
    bench.cluster.take()
    bench.intake.fetched(Fetched("a", None), bench.members.members["a"], 1.0)
    bench.intake.poll(bench.members, 2.0)
    assert bench.cluster.take() == ["a"]


def test_hearing_someone_out_takes_an_answer_to_a_new_question(bench):
    bench.intake.poll(bench.members, 0.0)
    bench.intake.hear(["a"])
    bench.answer("a")
    assert not bench.intake.heard(["a"])
    bench.answer("a")
    assert bench.intake.heard(["a"])


def test_who_is_gone_is_not_waited_for_and_not_believed(bench):
    bench.intake.hear(["b"])
    bench.intake.forget("b")
    bench.members = bench.members.out("b", "gone")
    assert bench.intake.heard(["b"])
    bench.answer("b", record(1))
    bench.fill("b", record(1))
    assert bench.line.last_step == 0
    assert "b" not in bench.intake.progress


def test_reports_go_where_they_belong(bench):
    evaluation = EvaluationRecord(2, 8, {"loss": 1.0}, 0.1, 1, 1)
    bench.answer("a", GenerationFormed(4, 0.1, 0.1), record(1), record(2), evaluation)
    assert bench.intake.formed == 4
    assert bench.line.last_step == 2
    assert bench.saves.step == 2
    assert bench.logs[1].last_step == 2
    assert bench.journal.status.step == 2
    assert bench.intake.progress["a"].phase == "compute"


def test_a_gap_is_asked_of_all_members(bench):
    bench.answer("a", record(1), record(4))
    bench.intake.poll(bench.members, 1.0)
    assert bench.cluster.steps == [("a", 1), ("b", 1)]
    bench.fill("b", record(2), record(3))
    assert bench.line.last_step == 4


def test_a_completed_step_that_nobody_told_is_asked_for(bench):
    bench.intake.expect(2)
    bench.intake.poll(bench.members, 1.0)
    assert bench.cluster.steps == [("a", 0), ("b", 0)]


def test_a_gap_is_passed_over_only_when_all_members_say_they_lack_it(bench):
    bench.answer("a", record(1), record(4))
    bench.intake.poll(bench.members, 1.0)
    bench.fill("a", record(4))
    bench.intake.steps_fetched(StepsFetched("b", None), bench.members.members["b"])
    bench.intake.poll(bench.members, 2.0)
    assert bench.line.last_step == 1, "b could not be asked, it may have them"
    bench.fill("a")
    bench.fill("b")
    bench.intake.poll(bench.members, 3.0)
    assert bench.line.last_step == 4
    assert [event.kind for event in bench.console.events] == [EventKind.DEGRADED]
    assert bench.console.events[0].reason.startswith("steps 2 to 3 are completed")


def test_going_on_from_where_the_line_is_takes_nothing_back(bench):
    bench.answer("a", record(1), record(2))
    assert not bench.intake.go_on(Position(2), 1)
    assert not bench.intake.go_on(Position(3), 2)
    assert bench.line.lacks(3) is True


def test_going_back_voids_what_was_told_beyond(bench):
    evaluation = EvaluationRecord(4, 8, {"loss": 1.0}, 0.1, 1, 1)
    bench.answer("a", *(record(step) for step in range(1, 6)), evaluation)
    assert bench.intake.go_on(Position(3), 1)
    assert bench.line.last_step == 3
    assert bench.logs[1].last_step is None
    bench.answer("a", record(4, generation=1))
    assert bench.line.last_step == 3
    bench.answer("a", record(4, generation=2))
    assert bench.line.last_step == 4


def test_digests_of_one_generation_must_agree(bench):
    bench.answer("a", StateDigest(1, 10, "aaaa"), StateDigest(2, 10, "cccc"))
    bench.answer("b", StateDigest(1, 10, "aaaa"))
    assert not bench.intake.drift
    bench.answer("b", StateDigest(2, 10, "dddd"))
    assert bench.intake.drift == "the members' states differ after step 10 (a: cccc, b: dddd)"


def test_who_tells_much_later_is_compared_all_the_same(bench):
    bench.answer("a", *(StateDigest(1, step, "aaaa") for step in range(1, 1001)))
    bench.intake.poll(bench.members, 0.0)
    bench.answer("b", StateDigest(1, 1, "aaaa"))
    bench.intake.poll(bench.members, 1.0)
    bench.answer("b", StateDigest(1, 2, "bbbb"), StateDigest(1, 3, "bbbb"))
    assert bench.intake.drift == "the members' states differ after step 2 (a: aaaa, b: bbbb)"


def test_who_is_gone_holds_no_digest_back(bench):
    bench.answer("a", StateDigest(1, 1, "aaaa"))
    bench.members = bench.members.out("b", "gone")
    bench.intake.forget("b")
    bench.intake.poll(bench.members, 0.0)
    assert bench.intake._comparison._tellers == {}
