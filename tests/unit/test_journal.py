"""What the controller says to the outside: events, status, console."""

import pytest
from tests.unit.fake_cluster import SilentConsole, record, status

from worldline.control.journal import Journal, Progress
from worldline.control.member import Drain
from worldline.control.membership import Membership
from worldline.events import EventKind
from worldline.tracking.log import EVENTS, EventLog, read_events
from worldline.tracking.status import DRAINING, RunState, StatusWriter, read_status
from worldline.worker.orders import Hello
from worldline.world import Position

HELLO = Hello(4711, "node", "10.0.0.1", {})


@pytest.fixture
def console():
    return SilentConsole()


@pytest.fixture
def journal(tmp_path, console):
    log = EventLog(tmp_path / EVENTS)
    journal = Journal(status(), log, StatusWriter(tmp_path), console)
    yield journal
    journal.close(RunState.STOPPED, "", "")
    log.close()


def test_an_event_is_on_disk_and_on_the_console(journal, console, tmp_path):
    journal.generation(3)
    journal.steps([record(1), record(2)])
    journal.event(EventKind.WORKER_LOST, "rank 1 is gone", workers=["w2"], world=1)
    [event] = read_events(tmp_path / EVENTS)
    assert (event.kind, event.generation, event.step, event.workers) == (EventKind.WORKER_LOST, 3, 2, ("w2",))
    assert (event.world_before, event.world_after) == (0, 1)
    assert console.events == [event]


def test_the_world_stays_until_an_event_changes_it(journal, tmp_path):
    journal.event(EventKind.GENERATION_FORMED, world=2)
    journal.event(EventKind.CHECKPOINT_SAVED, "step 5")
    journal.event(EventKind.WORKER_LOST, "rank 1 is gone", world=1)
    assert [(e.world_before, e.world_after) for e in read_events(tmp_path / EVENTS)] == [
        (0, 2),
        (2, 2),
        (2, 1),
    ]
    assert journal.status.world == 1


def test_incidents_are_counted(journal):
    for kind in (
        EventKind.WORKER_READY,
        EventKind.WORKER_LOST,
        EventKind.CHECKPOINT_SAVED,
        EventKind.NONFINITE,
    ):
        journal.event(kind)
    assert journal.status.incidents == 2


def test_a_change_of_state_is_on_disk_at_once(journal, tmp_path):
    journal.state(RunState.WAITING, "1 of at least 2 workers are ready")
    seen = read_status(tmp_path)
    assert (seen.state, seen.reason) == (RunState.WAITING, "1 of at least 2 workers are ready")


def test_steps_and_workers_are_in_the_status(journal, tmp_path):
    members = Membership().requested("a", 0.0).ready("a", HELLO, 0.0).requested("b", 0.0)
    members = members.ready("b", HELLO, 0.0).formed(["a"], Position(0), 0.0)
    journal.steps([record(1), record(2)])
    journal.refresh(members, {"a": Progress(Position(2), "reduce")}, now=True)
    seen = read_status(tmp_path)
    assert (seen.step, seen.loss, seen.standbys) == (2, 0.5, 1)
    [worker] = seen.workers
    assert (worker.rank, worker.pid, worker.step, worker.phase) == (0, 4711, 2, "reduce")
    assert 0 < seen.rows_per_s < 1000
    assert 0 < seen.goodput <= 1


def test_a_member_that_said_nothing_yet_forms(journal):
    members = Membership().requested("a", 0.0).ready("a", HELLO, 0.0).formed(["a"], Position(0), 0.0)
    journal.refresh(members, {})
    assert [(w.step, w.phase) for w in journal.status.workers] == [(0, "form")]


def test_a_rewind_takes_the_step_back(journal):
    journal.steps([record(step) for step in range(1, 10)])
    journal.rewound(4)
    assert journal.status.step == 4


def test_the_end(journal, tmp_path):
    journal.event(EventKind.GENERATION_FORMED, world=2)
    journal.close(RunState.FAILED, "why", "failed: why")
    seen = read_status(tmp_path)
    assert (seen.state, seen.reason, seen.world, seen.workers) == (RunState.FAILED, "why", 0, ())


def test_muted_it_writes_nothing_more(journal, console, tmp_path):
    journal.event(EventKind.GENERATION_FORMED, world=2)
    journal.state(RunState.RUNNING)
    journal.mute()
    before = [(tmp_path / name).read_bytes() for name in ("events.jsonl", "status.json")]
    journal.event(EventKind.STOPPED, "another driver has the run")
    journal.state(RunState.WAITING)
    journal.refresh(Membership(), {}, now=True)
    journal.close(RunState.STOPPED, "another driver has the run", "stopped")
    assert [(tmp_path / name).read_bytes() for name in ("events.jsonl", "status.json")] == before
    assert [event.kind for event in console.events] == [EventKind.GENERATION_FORMED, EventKind.STOPPED]


def test_who_shall_leave_is_shown_as_leaving(journal, tmp_path):
    membership = Membership().requested("a", 0.0).ready("a", HELLO, 1.0).formed(["a"], Position(0), 2.0)
    leaving = membership.draining(["a"], Drain(3.0, 9.0, "its node goes"))
    for world, phase in ((membership, "compute"), (leaving, DRAINING)):
        journal.refresh(world, {"a": Progress(Position(3), "compute")}, now=True)
        assert [worker.phase for worker in read_status(tmp_path).workers] == [phase]
