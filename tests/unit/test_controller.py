"""The controller against scripted workers: each story of a run, on a clock of its own."""

import pytest
from tests.unit.fake_cluster import Attempt

from worldline.collective.operations import Operation
from worldline.control import ending
from worldline.control.signals import Arrived, DrainRequested, LeaseLost, NodeDraining, Resize, StopRequested
from worldline.events import EvaluationRecord, EventKind
from worldline.health.condition import Condition
from worldline.tracking.log import EVENTS, STEPS
from worldline.tracking.status import STATUS, RunState
from worldline.worker.orders import EndKind
from worldline.world import Position

ALL = list(range(1, 21))


@pytest.fixture
def attempt(tmp_path):
    return lambda **options: Attempt(tmp_path, **options)


def finished(run):
    conclusion = run.run()
    assert (conclusion.state, conclusion.exit_code) == (RunState.FINISHED, 0), conclusion
    assert run.told == list(range(1, run.cluster.last_step + 1))
    assert run.saved == run.cluster.last_step
    assert not run.cluster.workers, "no worker outlives the run"


def stop(run, code=75):
    run.signals.post(StopRequested("SIGTERM", code))


# A run that nothing befalls


def test_from_the_start_to_the_last_step(attempt):
    run = attempt(checkpoint_every=5, evaluate_every=10)
    finished(run)
    assert run.worlds == [2]
    assert run.forgotten == [1]
    assert run.evaluated == [10, 20]
    assert run.reasons(EventKind.CHECKPOINT_SAVED) == ["step 5", "step 10", "step 15", "step 20"]
    assert run.journal.status.incidents == 0


def test_the_last_state_is_written_once(attempt):
    run = attempt()
    finished(run)
    assert sorted(run.storage.list("checkpoints/")) == [
        "checkpoints/step-00000020/a1-g1-r0.safetensors",
        "checkpoints/step-00000020/a1-g1-r1.safetensors",
        "checkpoints/step-00000020/manifest.json",
    ]


def test_the_last_evaluation_is_heard_although_all_else_is_told_and_saved(attempt):
    run = attempt()
    end = run.cluster.end

    def evaluate_first(worker, kind, *rest):
        if worker.position.evaluated:
            worker.outbox.append(EvaluationRecord(20, 8, {"loss": 1.0}, 2.0, 1, 1))
            end(worker, kind, *rest)
        elif run.saves.committed == 20:
            worker.position = Position(20, evaluated=True)

    run.cluster.end = evaluate_first
    finished(run)
    assert run.evaluated == [20]


def test_goes_on_from_a_checkpoint(attempt, tmp_path):
    first = attempt(checkpoint_every=5)
    first.cluster.script[13] = lambda: stop(first)
    assert first.run().exit_code == 75
    stopped_at = len(first.told)
    again = Attempt(tmp_path, checkpoint_every=5)
    again.saves.rewind(again.restore().position.step, durable=True)
    finished(again)
    assert again.restores == [stopped_at] * 2


# Deaths


def test_one_of_two_dies_and_is_replaced(attempt):
    run = attempt()
    run.cluster.script[7] = lambda: run.cluster.die("w2")
    run.cluster.script[8] = lambda: setattr(run.cluster, "last_step", 200)  # time for the next to join
    run.cluster.script[90] = lambda: setattr(run.cluster, "last_step", 100)
    assert run.run().exit_code == 0
    assert run.told == list(range(1, 101))
    assert run.worlds == [2, 1, 2]
    assert run.reasons(EventKind.WORKER_LOST) == ["rank 1 is gone"]
    assert run.restores == [0], "no survivor reads a checkpoint"


def test_below_min_the_survivor_keeps_its_state_until_another_comes(attempt):
    run = attempt(min=2)
    run.cluster.script[7] = lambda: run.cluster.die("w2")
    finished(run)
    assert run.worlds == [2, 2]
    assert run.reasons(EventKind.WAITING) == [
        "1 of at least 2 workers are ready; asked Ray for 2: 1 ready, 0 starting, 1 pending"
    ]


def test_below_min_for_too_long(attempt):
    run = attempt(min=2)
    run.cluster.script[7] = lambda: run.cluster.die("w2")
    run.cluster.request = lambda avoid, request=run.cluster.request: (
        run.cluster.workers.pop(id := request()) and id if run.cluster.count >= 2 else request()
    )
    conclusion = run.run()
    assert conclusion.exit_code == 75
    assert "1 of at least 2 workers are ready" in conclusion.reason
    assert "gave up after 60 s" in conclusion.reason
    assert run.saved == 6, "what the survivor holds is brought home"


def test_all_die_and_the_line_goes_back_to_the_checkpoint(attempt):
    run = attempt(checkpoint_every=5)

    def all_die():
        run.cluster.die("w1")
        run.cluster.die("w2")

    run.cluster.script[14] = all_die
    finished(run)
    assert run.restores == [0, 10]
    assert run.reasons(EventKind.RESTORED) == ["checkpoints/step-00000010"]


def test_all_die_before_the_first_checkpoint(attempt):
    run = attempt()
    run.cluster.script[3] = lambda: [run.cluster.die(id) for id in ("w1", "w2")]
    finished(run)
    assert run.restores == [0, 0]


def test_who_tells_dies_with_steps_untold_and_another_tells_them(attempt):
    run = attempt(step_s=0.02)

    def die_untold():
        assert any(getattr(item, "step", 0) == 8 for item in run.cluster.workers["w1"].outbox)
        run.cluster.die("w1")

    run.cluster.script[9] = die_untold
    finished(run)


def test_who_is_ahead_gives_the_state_to_who_is_behind(attempt):
    run = attempt(max=3)

    def break_ahead():
        """w1 tells, w2 completed step 8 alone, w3 is behind."""
        run.cluster.complete(run.cluster.workers["w2"], 8)
        run.cluster.die("w1")

    run.cluster.script[8] = break_ahead
    finished(run)
    order = next(order for id, order in run.cluster.orders if order.generation == 2)
    assert (order.position, order.sources, order.receivers) == (Position(8), (0,), (1,))
    assert run.worlds[:2] == [3, 2]


def test_steps_that_nobody_can_tell_any_more_are_named(attempt):
    run = attempt(max=3, step_s=0.02)

    def forgotten():
        """w1 told of step 8 to nobody, and the others got the state without the record."""
        for id in ("w2", "w3"):
            run.cluster.workers[id].records.clear()
        run.cluster.workers["w1"].outbox.clear()
        run.cluster.die("w1")

    run.cluster.script[9] = forgotten
    assert run.run().exit_code == 0
    missing = sorted(set(ALL) - set(run.told))
    assert missing == list(range(missing[0], 9))
    assert run.told == [step for step in ALL if step not in missing]
    assert run.reasons(EventKind.DEGRADED) == [
        f"steps {missing[0]} to 8 are completed, but the workers that could tell of them are lost: "
        "they are missing in the step log"
    ]


def test_a_newcomer_without_the_state_does_not_begin_the_line_anew(attempt):
    """The last who held the state dies before the newcomer has it."""
    run = attempt(checkpoint_every=5, last_step=60)
    run.cluster.script[7] = lambda: run.cluster.die("w2")

    def form(training, form=run.cluster.form):
        if training[0].order.generation == 3:
            assert {w.id for w in training} == {"w1", "w3"}
            run.cluster.die("w1")
        else:
            form(training)

    run.cluster.form = form
    assert run.run().exit_code == 0
    assert run.told == list(range(1, 61))
    assert run.restores[1] >= 5
    assert run.restores[1] % 5 == 0


def test_a_frozen_member_is_given_up(attempt):
    run = attempt(max=3)

    def freeze():
        run.cluster.workers["w2"].frozen = True
        run.cluster.die("w3")

    run.cluster.script[7] = freeze
    finished(run)
    silent = "rank 1 gave no sign of life for 3.0 s: frozen, or cut off"
    assert run.reasons(EventKind.WORKER_LOST) == ["rank 2 is gone", silent]
    assert "w2" in run.cluster.killed


def test_what_the_others_wait_for_is_told_before_a_frozen_member_goes(attempt):
    run = attempt(max=3)

    def freeze():
        run.cluster.workers["w2"].frozen = True
        for id in ("w1", "w3"):
            run.cluster.workers[id].condition = waits(1)
        return "frozen"

    run.cluster.script[7] = freeze
    finished(run)
    [diagnosis] = run.reasons(EventKind.HANG)
    assert diagnosis.startswith("Ranks 0 and 2 wait in all_to_all bucket 3")
    assert "rank 1 (w2 on 10.0.0.1) gave no answer" in diagnosis
    assert run.worlds == [3, 2, 3]


def waits(generation):
    operation = Operation(0, 9, "all_to_all", "bucket 3", 4096)
    return Condition(generation, 6, "reduce", 4.0, operation, 4.0, (operation,), (operation,))


def test_who_computes_for_ever_is_replaced_and_that_counts_as_an_error_of_its_code(attempt):
    run = attempt(max=3, task_errors=2)

    def loop():
        workers, generation = run.cluster.workers, run.parts.journal.status.generation
        ids = sorted(id for id, worker in workers.items() if worker.order is not None)
        for id in ids:
            workers[id].condition = waits(generation)
        loops = Condition(generation, 6, "compute", 40.0, where="model.py:7 in loss")
        workers[ids[-1]].condition = loops
        run.cluster.next_step = run.now + 100
        return "it loops"

    run.cluster.script[7] = loop
    finished(run)
    [diagnosis] = run.reasons(EventKind.HANG)
    assert "model.py:7 in loss" in diagnosis
    assert run.told == list(range(1, 21))


def test_a_drained_member_leaves_once_it_is_replaced(attempt):
    run = attempt(max=3, last_step=60)
    run.cluster.script[5] = lambda: run.ask(lambda answer: DrainRequested("1", 60.0, "somebody", answer))
    finished(run)
    assert run.worlds == [3, 3]
    assert run.answers == [(True, "w2 will leave within 60 s")]
    assert run.reasons(EventKind.WORKER_RELEASED) == ["asked by somebody"]
    assert run.reasons(EventKind.WORKER_LOST) == []


def test_who_is_placed_on_a_node_that_is_known_to_go_is_let_go(attempt):
    run = attempt(max=2, last_step=60)
    request = run.cluster.request

    def place(avoid):
        id = request(avoid)
        if id == "w3":
            run.cluster.signals.post(NodeDraining("far", 60.0, "Ray drains node far"))
            run.cluster.signals.post(Arrived(id, 7, "far", "10.0.0.9"))
        return id

    run.cluster.request = place
    run.cluster.script[5] = lambda: run.cluster.die("w2")
    finished(run)
    released = [event for event in run.events if event.kind is EventKind.WORKER_RELEASED]
    assert [(event.workers, event.reason) for event in released] == [(("w3",), "Ray drains node far")]
    assert run.worlds == [2, 1, 2]


def test_a_drain_below_min_saves_first_and_then_waits(attempt):
    run = attempt(min=2, max=2, last_step=60)
    run.cluster.starts = {"w3": "there is no room"}
    run.cluster.script[5] = lambda: run.ask(lambda answer: DrainRequested("w2", 8.0, "somebody", answer))
    finished(run)
    assert run.worlds == [2, 2]
    [saved, *_] = run.reasons(EventKind.CHECKPOINT_SAVED)
    assert int(saved.split()[1]) >= 5
    assert run.reasons(EventKind.WAITING) != []
    assert run.restores == [0], "the one that stayed kept the state"


def drain_both(run):
    for rank in "01":
        run.ask(lambda answer, rank=rank: DrainRequested(rank, 8.0, "somebody", answer))


def test_all_are_drained_and_others_go_on_from_what_they_saved(attempt):
    run = attempt(max=2, last_step=60)
    run.cluster.starts = {"w3": "there is no room", "w4": "there is no room"}

    run.cluster.script[5] = lambda: drain_both(run)
    finished(run)
    assert len(run.restores) == 2
    assert run.restores[1] >= 5


def test_who_is_left_saves_what_another_that_must_leave_died_writing(attempt):
    run = attempt(min=2, max=2, last_step=60)
    run.cluster.starts = {f"w{number}": "there is no room" for number in range(3, 7)}
    write = run.cluster.write_checkpoint

    def die_of_it(id, *numbers):
        run.cluster.write_checkpoint = write
        run.cluster.die(id)

    def drain():
        run.cluster.write_checkpoint = die_of_it
        drain_both(run)

    run.cluster.script[5] = drain
    finished(run)
    assert len(run.restores) == 2
    assert run.restores[1] >= 5


def test_a_worker_that_keeps_the_connections_of_many_generations_is_replaced(attempt):
    run = attempt(max=2, last_step=200, generations_a_worker=4)
    for step in (10, 40, 70, 100):
        run.cluster.script[step] = lambda: run.cluster.die(
            max(run.cluster.workers, key=lambda id: int(id[1:]))
        )
    finished(run)
    released = [event for event in run.events if event.kind is EventKind.WORKER_RELEASED]
    assert released[0].workers == ("w1",)
    assert released[0].reason == "it has been in 5 generations and keeps the connections of each"
    assert len(run.reasons(EventKind.WORKER_LOST)) == 4
    assert max(run.worlds) == 2
    assert run.restores == [0]


@pytest.mark.parametrize(("least", "replaced"), [(1, True), (2, False)])
def test_a_worn_worker_of_a_world_that_is_never_whole(attempt, least, replaced):
    """It may go where one can be spared."""
    run = attempt(min=least, max=3, last_step=60, generations_a_worker=1)
    request = run.cluster.request

    def no_room_for_a_third(avoid):
        id = request(avoid)
        if len(run.cluster.workers) > 2:
            run.cluster.workers.pop(id)
        return id

    run.cluster.request = no_room_for_a_third
    finished(run)
    assert any("keeps the connections" in reason for reason in run.reasons(EventKind.DRAINING)) is replaced


def test_the_world_is_resized_both_ways(attempt):
    run = attempt(max=2, last_step=90)
    for step, workers in ((5, 4), (40, 1), (60, 9)):
        run.cluster.script[step] = lambda workers=workers: run.ask(
            lambda answer: Resize(workers, "somebody", answer)
        )
    finished(run)
    assert run.worlds[0] == 2
    assert max(run.worlds) == 4
    assert run.worlds[-1] == 1
    assert [accepted for accepted, _ in run.answers] == [True, True, False]
    assert "logical_shards" in run.answers[-1][1]
    assert len(run.reasons(EventKind.WORKER_RELEASED)) == 3


def test_a_standby_that_dies_is_noticed_and_replaced(attempt):
    run = attempt(max=1, standby=1, last_step=200)
    run.cluster.script[50] = lambda: run.cluster.die("w2")
    assert run.run().exit_code == 0
    assert run.reasons(EventKind.WORKER_LOST) == ["standby is gone"]
    assert run.worlds == [1]
    assert run.cluster.count == 3


def test_a_torn_state_before_the_first_checkpoint_begins_with_a_new_worker(attempt):
    run = attempt(max=1)
    run.cluster.script[4] = lambda: run.cluster.end(
        run.cluster.workers["w1"], EndKind.TASK_ERROR, "update failed", "trace", torn=True
    )
    finished(run)
    assert run.restores == [0, 0, 0]
    assert "w1" in run.cluster.killed


def test_a_save_that_a_death_tore_is_made_again_at_once(attempt):
    run = attempt(checkpoint_every=7, max=3)

    def die_with_its_part():
        for item in list(run.cluster.workers["w3"].outbox):
            if hasattr(item, "parts"):
                run.cluster.workers["w3"].outbox.remove(item)
        run.cluster.die("w3")

    run.cluster.script[8] = die_with_its_part
    finished(run)
    saved = run.reasons(EventKind.CHECKPOINT_SAVED)
    assert saved == ["step 7", "step 14", "step 20"]


# Joins


def test_a_late_worker_joins_at_a_border(attempt):
    run = attempt(max=3, last_step=60)
    run.cluster.request = lambda avoid, request=run.cluster.request: delayed(run, request)
    assert run.run().exit_code == 0
    assert run.worlds == [2, 3]
    assert run.told == list(range(1, 61))
    assert run.journal.status.incidents == 0
    invited = [(id, i.meeting.rank, i.meeting.size) for id, i in run.cluster.invitations]
    assert invited == [("w1", 0, 3), ("w2", 1, 3), ("w3", 2, 3)]
    orders = dict(run.cluster.orders[-3:])
    for id, invitation in run.cluster.invitations:
        assert orders[id].ranges[orders[id].rank] == invitation.shards
        assert 0 <= orders[id].position.step - invitation.step <= 3
    assert [order.met for _, order in run.cluster.orders] == [0, 0, 1, 1, 1], "connected beforehand"


def test_who_cannot_connect_is_not_waited_for(attempt):
    run = attempt(max=3, last_step=100)
    run.cluster.request = lambda avoid, request=run.cluster.request: delayed(run, request)
    run.cluster.no_meeting = "w3 cannot be reached"
    finished(run)
    assert run.worlds == [2]
    assert run.reasons(EventKind.WORKER_LOST)[0] == (
        "standby could not connect with the others: w3 cannot be reached"
    )


@pytest.mark.parametrize("fault", ["absent", "death"])
def test_a_join_needs_no_meeting(attempt, fault):
    """Somebody does not answer, or dies when all have met."""
    run = attempt(max=3, last_step=100)
    run.cluster.request = lambda avoid, request=run.cluster.request: delayed(run, request)
    if fault == "absent":
        run.cluster.absent = {"w3"}
    else:
        run.cluster.meet = lambda id, meeting, meet=run.cluster.meet: (
            meet(id, meeting),
            {id, "w2"} <= run.cluster.workers.keys() and id == "w3" and run.cluster.die("w2"),
        )
    assert run.run().exit_code == 0
    assert run.told == list(range(1, 101))
    assert run.worlds[:2] == ([2, 2] if fault == "death" else [2, 3])
    assert not any(order.met for _, order in run.cluster.orders[: sum(run.worlds[:2])])


def delayed(run, request):
    id = request()
    if id == "w3":
        run.cluster.workers[id].ready_at += 5
    return id


def test_a_worker_with_other_numerics_is_left_out(attempt):
    run = attempt(last_step=60)
    run.cluster.starts = {f"w{n}": {"torch": "3"} for n in range(2, 50)}
    assert run.run().exit_code == 0
    assert run.worlds == [1]
    refusals = run.reasons(EventKind.WORKER_START_FAILED)
    assert refusals[0] == (
        "node 10.0.0.1 would compute other bits than the run (torch: 3 here, 2 there); "
        "use nodes of one kind, or mode: same_batches"
    )
    assert len(refusals) <= 4, "no storm of starts"


def test_failed_starts_are_tried_again_ever_later(attempt):
    run = attempt(max=1, start_s=100)
    run.cluster.prepare = lambda worker: run.cluster.die(worker.id)
    conclusion = run.run()
    assert conclusion.exit_code == 75
    assert "last: is gone" in conclusion.reason
    assert 4 <= run.cluster.count <= 7


def test_a_task_that_cannot_be_built_ends_the_run(attempt):
    run = attempt()
    run.cluster.starts = {"w1": "ImportError: no jobs", "w2": "ImportError: no jobs"}
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert conclusion.reason == "a worker could not be prepared: ImportError: no jobs"


def test_a_node_on_which_the_task_cannot_be_built_is_not_the_tasks_fault(attempt):
    run = attempt()
    run.cluster.starts = {"w1": "OSError: nothing is mounted here"}
    request = run.cluster.request

    def place(avoid):
        id = request(avoid)
        run.cluster.signals.post(Arrived(id, 7, f"node {id}", "10.0.0.9"))
        return id

    run.cluster.request = place
    finished(run)
    assert run.reasons(EventKind.WORKER_START_FAILED) == ["OSError: nothing is mounted here"]


# Stops


@pytest.mark.parametrize("code", [75, 130])
def test_a_stop_saves_where_the_run_is(attempt, code):
    run = attempt()
    run.cluster.script[9] = lambda: stop(run, code)
    conclusion = run.run()
    assert (conclusion.state, conclusion.reason, conclusion.exit_code) == (RunState.STOPPED, "SIGTERM", code)
    assert run.told == list(range(1, run.saved + 1))
    assert 9 <= run.saved <= 11


def test_a_stop_while_workers_start(attempt):
    run = attempt()
    run.cluster.at_time = [(0.5, lambda: stop(run))]
    conclusion = run.run()
    assert conclusion.exit_code == 75
    assert run.now < 1
    assert not run.cluster.workers


def test_a_stop_while_recovering(attempt):
    run = attempt(max=3)

    def frozen_and_dead():
        run.cluster.workers["w2"].frozen = True
        run.cluster.die("w3")
        stop(run)

    run.cluster.script[9] = frozen_and_dead
    conclusion = run.run()
    assert conclusion.exit_code == 75
    assert run.saved == 8
    assert run.told == list(range(1, 9))
    assert run.now < 15


def test_a_stop_of_a_world_that_is_frozen_as_a_whole_ends(attempt):
    run = attempt(max=1)

    def freeze():
        run.cluster.workers["w1"].frozen = True
        stop(run)
        return "frozen"

    run.cluster.script[9] = freeze
    assert run.run().exit_code == 75
    assert run.now < 2 * 30 + 10


def test_a_holder_that_freezes_while_the_last_state_is_saved_is_left_out(attempt):
    run = attempt()
    write = run.cluster.write_checkpoint

    def freeze(id, *numbers):
        run.cluster.workers[id].frozen = True
        run.cluster.write_checkpoint = write

    run.cluster.write_checkpoint = freeze
    run.cluster.script[9] = lambda: stop(run)
    conclusion = run.run()
    assert (conclusion.exit_code, conclusion.reason) == (75, "SIGTERM")
    assert run.saved >= 9
    assert run.now < 30


def test_a_stop_on_a_step_whose_save_a_death_tore(attempt):
    """The parts of the torn save and those of the last one must not be mixed."""
    run = attempt(checkpoint_every=8)

    def lose_the_part(id):
        if id == "w2":
            run.cluster.workers[id].outbox.pop()

    def die_and_stop():
        assert run.saves.pending(8)
        run.cluster.die("w2")
        stop(run)

    run.cluster.write_hook = lose_the_part
    run.cluster.script[9] = die_and_stop
    conclusion = run.run()
    assert conclusion.exit_code == 75
    assert run.saved == 8
    assert run.now < 10


def test_a_checkpoint_does_not_wait_for_the_part_of_one_who_left(attempt):
    run = attempt(checkpoint_every=10, last_step=30)
    saved = []

    def lose_the_part(id):
        if id == "w2":
            run.cluster.workers[id].outbox.pop()

    def shrink():
        run.ask(lambda answer: Resize(1, "somebody", answer))

    run.cluster.write_hook = lose_the_part
    run.cluster.script[9] = shrink
    run.cluster.script[19] = lambda: saved.append(run.saved)
    finished(run)
    assert run.worlds == [2, 1]
    assert 10 <= saved[0] < 19


def test_a_holder_dies_while_it_writes_the_last_state(attempt):
    run = attempt()
    run.cluster.script[9] = lambda: stop(run)

    def die(id):
        if id == "w2":
            run.cluster.workers["w2"].outbox.clear()
            run.cluster.workers["w2"].order = "busy"
            run.cluster.die("w2")

    run.cluster.write_hook = die
    conclusion = run.run()
    assert conclusion.exit_code == 75
    assert run.saved >= 9


def test_all_holders_die_while_they_write_the_last_state(attempt):
    run = attempt(checkpoint_every=4)
    run.cluster.script[9] = lambda: stop(run)

    def die(id):
        if run.cluster.workers[id].order is None:
            run.cluster.workers.pop(id)

    run.cluster.write_hook = die
    conclusion = run.run()
    assert (conclusion.state, conclusion.exit_code) == (RunState.STOPPED, 75)
    assert "died before it was saved" in conclusion.reason
    assert run.saved == 8


# What goes wrong with the job or its storage


def test_a_checkpoint_that_fails_does_not_stop_the_training(attempt):
    run = attempt(checkpoint_every=5)
    run.cluster.script[4] = lambda: setattr(run.cluster, "fail_writes", "disk full")
    run.cluster.script[11] = lambda: setattr(run.cluster, "fail_writes", "")
    finished(run)
    assert run.reasons(EventKind.CHECKPOINT_FAILED) == [
        f"step {step}: rank 0: disk full; rank 1: disk full; the checkpoints before it stay"
        for step in (5, 10)
    ]
    assert run.reasons(EventKind.CHECKPOINT_SAVED) == ["step 15", "step 20"]


def test_a_last_state_that_cannot_be_saved_is_a_failure(attempt):
    run = attempt()
    run.cluster.fail_writes = "disk full"
    conclusion = run.run()
    assert (conclusion.state, conclusion.exit_code) == (RunState.FAILED, 1)
    assert conclusion.reason.startswith("finished, but the state of step 20 is not saved: rank 0: disk full")
    assert run.told == ALL
    assert run.now < 60


def test_no_answer_about_the_last_state(attempt, monkeypatch):
    monkeypatch.setattr(ending, "SAVE_S", 20.0)
    run = attempt()
    run.cluster.script[9] = lambda: stop(run)
    run.cluster.write_part = lambda *_: None
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert "no answer within 20 s" in conclusion.reason


def test_the_tasks_errors_are_counted_and_a_traceback_is_shown_once(attempt):
    run = attempt(task_errors=3)

    def raise_again():
        run.cluster.script[7] = raise_again
        run.cluster.end(
            next(w for w in run.cluster.workers.values() if w.order and w.order.rank == 1),
            EndKind.TASK_ERROR,
            "ValueError: bad",
            "Traceback: line 3",
        )
        return "raised"

    run.cluster.script[7] = raise_again
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert conclusion.reason == "the task's code raised 3 times, last on rank 1: ValueError: bad"
    told = run.reasons(EventKind.TASK_ERROR)
    assert [text.count("Traceback") for text in told] == [1, 0, 0]
    assert run.reasons(EventKind.COLLECTIVE_FAILED) == []
    assert run.saved == 6


def test_nonfinite_ends_the_run_with_its_state_saved(attempt):
    run = attempt()
    run.cluster.script[7] = lambda: [
        run.cluster.end(w, EndKind.NONFINITE, "the loss is not finite at step 7")
        for w in list(run.cluster.workers.values())
    ]
    conclusion = run.run()
    assert (conclusion.exit_code, conclusion.reason) == (1, "the loss is not finite at step 7")
    assert run.saved == 6


def test_members_whose_states_differ_end_the_run_and_save_nothing(attempt):
    run = attempt(checkpoint_every=5)
    run.cluster.script[10] = lambda: setattr(run.cluster.workers["w2"], "taint", "f")
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert conclusion.reason == (
        "the members' states differ after step 10 (w1: 000000000000, w2: ffffffffffff)"
    )
    assert run.saved == 5


def test_generations_that_break_without_a_step(attempt):
    run = attempt(no_progress=3, max=1)

    def broken(training):
        for worker in training:
            worker.position = worker.order.position
            run.cluster.end(worker, EndKind.BROKEN, "no route to host")

    run.cluster.form = broken
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert "3 generations in a row completed no step beyond 0" in conclusion.reason
    assert run.reasons(EventKind.COLLECTIVE_FAILED)[0] == "rank 0: no route to host"


def test_no_checkpoint_is_whole_when_all_have_died(attempt, tmp_path):
    run = attempt(checkpoint_every=5)

    def damage_and_die():
        for path in (tmp_path / "checkpoints").rglob("*.safetensors"):
            path.write_bytes(b"")
        run.cluster.die("w1")
        run.cluster.die("w2")

    run.cluster.script[12] = damage_and_die
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert "none of the run's checkpoints is usable" in conclusion.reason


# Another driver has the run


def test_after_the_lease_is_lost_nothing_is_written(attempt, tmp_path):
    run = attempt(checkpoint_every=5)
    before = {}

    def lose():
        run.may_write = False
        run.signals._waiting.appendleft(LeaseLost("another driver has taken the run"))
        run.journal._writer._flush()  # what its thread would still write of the time before
        for name in (STEPS, EVENTS, STATUS):
            before[name] = (tmp_path / name).read_bytes()
        return "lost"

    run.cluster.script[8] = lose
    conclusion = run.run()
    assert (conclusion.state, conclusion.exit_code) == (RunState.STOPPED, 75)
    assert conclusion.reason == "another driver has taken the run"
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert run.saved == 5
    assert not run.cluster.workers


def test_a_commit_is_refused_once_another_driver_may_write(attempt):
    run = attempt(checkpoint_every=5)
    run.cluster.script[8] = lambda: setattr(run, "may_write", False)
    conclusion = run.run()
    assert conclusion.exit_code == 1
    assert "another driver has taken the run" in conclusion.reason
    assert run.saved == 5


# The driver itself


def test_an_error_of_the_driver_ends_the_workers(attempt):
    run = attempt()
    run.cluster.script[5] = lambda: setattr(run.parts.journal, "event", None)
    run.cluster.script[6] = lambda: run.cluster.die("w2")
    with pytest.raises(TypeError):
        run.run()
    assert not run.cluster.workers
