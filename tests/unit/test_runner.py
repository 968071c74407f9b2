"""Generations of real processes: whatever befalls them, the line of steps is the undisturbed one.

Every end leaves a worker at the step before or at the next, with that step's digest, and what goes on from
there gives the same bits.
"""

import os
import signal
from dataclasses import replace

import pytest
import torch
from tests.unit import tiny
from tests.unit.ranks import DEADLINE_S, another, peers
from tests.unit.tiny import Case, Line, kinds

from worldline.checkpoint.manifest import directory
from worldline.events import EvaluationRecord
from worldline.worker.orders import EndKind, Invitation, Meeting, Met, StateDigest
from worldline.world import Position, ShardRange

LAST = 4


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return str(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def case(storage):
    return Case(loss="weighted", last_step=LAST, storage=storage)


@pytest.fixture(scope="module")
def truth(case):
    """The undisturbed line of one worker: position -> state digest, and the records."""
    with peers(1) as (alone,):
        line = Line(case)
        line.build([alone])
        digests = {0: alone.call(tiny.state_digest)}
        assert kinds(line.run([alone])) == [EndKind.FINISHED]
        records = alone.call(tiny.told)
    return digests | {record[0]: record[5] for record in records}, records


def assert_whole(ends, truth):
    """Every state is that of its position on the undisturbed line."""
    for peer, end in ends.items():
        assert end.position is not None, end
        assert peer.call(tiny.state_digest) == truth[0][end.position.step], end


def assert_finished(line, members, truth, sources=None, **order):
    """Those members go on to the end; what they say of every step is what one undisturbed worker says."""
    ends = line.run(members, sources, **order)
    assert kinds(ends) == [EndKind.FINISHED] * len(members), ends
    assert_whole(ends, truth)
    known = {record[0]: record for peer in members for record in peer.call(tiny.told)}
    assert [known[step] for step in sorted(known)] == truth[1]


def holders(ends, line):
    return [peer for peer, end in ends.items() if end.position == line.position]


def test_the_world_changes_at_every_step_and_the_line_does_not(case, truth):
    """Halts at borders, members join without state and leave, assignments move."""
    with peers(5) as processes:
        line = Line(case)
        line.build(processes)
        worlds = [
            processes[:3],
            processes[:1],
            [processes[0], *processes[2:]],
            processes[1:3] + processes[3:],
        ]
        ends = {}
        for number, members in enumerate(worlds):
            members[-1].now(tiny.halt, line.generation + 1)
            ends = line.run(members, holders(ends, line) if ends else None)
            expected = EndKind.FINISHED if number + 1 == LAST else EndKind.HALTED
            assert kinds(ends) == [expected] * len(members), ends
            assert {end.position for end in ends.values()} == {Position(number + 1)}
            assert_whole(ends, truth)
        known = {record[0]: record for peer in processes for record in peer.call(tiny.told)}
        assert [known[step] for step in sorted(known)] == truth[1]


def test_a_generation_goes_on_with_those_who_met_before_it(case, truth):
    """Two train, and connect with a third meanwhile; a meeting at which one was missing disturbs nobody."""
    with peers(3) as members:
        line = Line(case)
        line.build(members)
        members[0].now(tiny.halt, 1)
        line.begin(members[:2])
        line.meet(members[:2], 1)
        line.meet(members, 2)
        ends = line.ends()
        assert kinds(ends) == [EndKind.HALTED] * 2
        assert [peer.call(tiny.met, 2) for peer in members] == [Met(2, 2)] * 3
        assert_finished(line, members, truth, holders(ends, line), met=2)


@pytest.mark.parametrize("point", range(9))
def test_a_state_that_nobody_confirmed_is_held_by_nobody(case, truth, point):
    """A source whose state differs dies anywhere before the first step is done."""
    with peers(2) as (first, receiver):
        source = another([first])
        line = Line(case)
        line.build([first, source, receiver])
        source.call(spoil, "mean")
        source.call(tiny.arm, "kill", 1, point)
        ends = line.run([first, source, receiver], sources=[first, source])
        assert source not in ends
        assert {end.kind for end in ends.values()} <= {EndKind.BROKEN, EndKind.DISAGREED}
        assert ends[first].position == Position(0)
        for peer in (first, receiver):
            if ends[peer].position is not None:
                assert peer.call(tiny.state_digest) == truth[0][0]
        assert_finished(line, [first, receiver], truth, holders(ends, line))


def test_who_was_not_at_the_meeting_says_so(case, truth):
    with peers(2) as members:
        line = Line(case)
        line.build(members)
        line.meet(members, 1)
        assert [peer.call(tiny.met, 1) for peer in members] == [Met(1, 1)] * 2
        ends = line.run(members, met=2)
        assert set(kinds(ends)) == {EndKind.BROKEN}
        assert "was not at the meeting generation-1-2" in ends[members[0]].reason
        assert_finished(line, members, truth)


def test_a_meeting_is_left_when_its_generation_is_given_up(case, truth):
    with peers(2) as members:
        line = Line(case)
        line.build(members)
        meeting = Meeting(generation=1, number=1, rank=0, size=2)  # rank 1 never comes
        members[0].now(tiny.meet, Invitation(meeting, ShardRange(0, 4), 1))
        line.generation = 1
        line.abandon(members)
        assert members[0].call(tiny.met, 1).error.startswith("gave up forming")
        assert_finished(line, members, truth)


def test_ranges_of_any_size_give_the_same_line(case, truth):
    with peers(3) as members:
        line = Line(case)
        line.build(members)
        line.begin(members, ranges=(ShardRange(0, 1), ShardRange(1, 7), ShardRange(7, 8)))
        assert_whole(line.ends(), truth)


def points_of_a_step(case, member_count):
    """How many points a rank passes in step 2, the short one of the first epoch."""
    with peers(member_count) as members:
        line = Line(case)
        line.build(members)
        for peer in members:
            peer.call(tiny.arm, "count", 2, -1)
        line.run(members)
        return [peer.call(tiny.count_points) for peer in members]


@pytest.mark.parametrize("strike", ["kill", "stop"])
def test_a_peer_dies_or_freezes_at_any_point_of_a_step(case, truth, strike):
    """The others are at the step before or the next, whole; those behind get the state, a newcomer too."""
    (_, points, _) = points_of_a_step(case, 3)
    chosen = range(0, points, 3) if strike == "kill" else (1, points // 2)
    assert len(chosen) in (2, *range(6, 20))
    with peers(2) as processes:
        survivors = list(processes)
        for point in chosen:
            victim = another(processes)
            members = [survivors[0], victim, survivors[1]]
            line = Line(case)
            line.build(members)
            victim.call(tiny.arm, strike, 2, point)
            line.begin(members)
            if strike == "kill":
                assert victim.answered(DEADLINE_S)
            else:
                victim.wait_stopped()
                line.abandon(survivors)
            line.members = survivors
            if strike == "kill" and not all(peer.answered(5) for peer in survivors):
                line.abandon(survivors)
            ends = line.ends()
            assert set(kinds(ends)) == {EndKind.BROKEN}, ends
            assert {end.position.step for end in ends.values()} <= {1, 2}
            assert_whole(ends, truth)
            if strike == "stop":  # it wakes in a generation that is over, and disturbs nobody
                os.kill(victim.pid, signal.SIGCONT)
            newcomer = another(processes)
            line.build([newcomer])
            assert_finished(line, [*survivors, newcomer], truth, holders(ends, line))
            victim.kill()
            newcomer.kill()


def test_survivors_do_not_compute_again_what_they_had_finished(case, truth):
    with peers(3) as (first, victim, second):
        line = Line(case)
        line.build([first, victim, second])
        victim.call(tiny.arm, "kill", 2, 0)
        line.begin([first, victim, second], ranges=(ShardRange(0, 3), ShardRange(3, 6), ShardRange(6, 8)))
        ends = line.ends()
        assert set(kinds(ends)) == {EndKind.BROKEN}
        assert_whole(ends, truth)
        assert_finished(line, [first, second], truth)
        # In this short step shards 0, 1 and 2 have two micro-batches, the others one.
        assert first.call(tiny.count_losses)[2] == 2 * 3 + 1
        assert second.call(tiny.count_losses)[2] == 2 + 2


def test_a_worker_abandons_at_any_point_of_a_step(case, truth):
    points = points_of_a_step(case, 2)[0]
    with peers(2) as members:
        for point in (0, points // 3, points - 2):
            line = Line(case)
            line.build(members)
            members[0].call(tiny.arm, "abandon", 2, point)
            line.begin(members)
            assert members[0].answered(DEADLINE_S)
            line.abandon(members)
            ends = line.ends()
            assert set(kinds(ends)) <= {EndKind.BROKEN, EndKind.FINISHED}
            assert_whole(ends, truth)
            assert_finished(line, members, truth, holders(ends, line))


@pytest.mark.parametrize(
    ("strike", "reason"), [("error", "ValueError: the task is wrong"), ("memory", "MemoryError: no memory")]
)
def test_an_error_of_the_task_on_one_rank_is_told_and_leaves_all_whole(case, truth, strike, reason):
    with peers(2) as members:
        for point in (0, 1, 4):
            line = Line(case)
            line.build(members)
            members[1].call(tiny.arm, strike, 2, point)
            line.begin(members)
            assert members[1].answered(DEADLINE_S)
            line.abandon(members[:1])
            ends = line.ends()
            assert kinds(ends) == [EndKind.BROKEN, EndKind.TASK_ERROR]
            assert ends[members[1]].reason.startswith(reason)
            assert "tiny.py" in ends[members[1]].traceback
            assert {end.position for end in ends.values()} == {Position(1)}
            assert_whole(ends, truth)
            assert_finished(line, members, truth)


def test_a_row_that_is_not_finite_ends_the_generation_alike_everywhere(case, truth):
    """On whichever rank it lies; with the policy `skip` the same step is left out by all."""
    with peers(3) as members:
        line = Line(replace(case, nan_row=5))
        line.build(members)
        ends = line.run(members)
        assert kinds(ends) == [EndKind.NONFINITE] * 3
        assert len({(end.reason, end.position) for end in ends.values()}) == 1
        assert_whole(ends, truth)

        line = Line(replace(case, nan_row=5, skip_nonfinite=True))
        line.build(members)
        assert kinds(line.run(members)) == [EndKind.FINISHED] * 3
        told = [peer.call(tiny.told) for peer in members]
        assert told[0] == told[1] == told[2]
        assert [record[0] for record in told[0] if record[4]]
        assert len({peer.call(tiny.state_digest) for peer in members}) == 1


def test_an_order_that_was_abandoned_before_it_came_ends_at_once(case, truth):
    with peers(1) as (alone,):
        line = Line(case)
        line.build([alone])
        alone.now(tiny.abandon, 1)
        ends = line.run([alone])
        assert kinds(ends) == [EndKind.BROKEN]
        assert_whole(ends, truth)
        assert_finished(line, [alone], truth)


def test_members_that_differ_are_told_in_what(case):
    def disagreement(members, line, **order):
        ends = line.run(members, **order)
        assert kinds(ends) == [EndKind.DISAGREED] * len(members)
        assert len({end.reason for end in ends.values()}) == 1
        return ends

    with peers(3) as members:
        lines = [Line(case), Line(replace(case, fingerprint="b"))]
        lines[0].build(members[:2])
        lines[1].prefix = lines[0].prefix
        lines[1].build(members[2:])
        ends = disagreement(members, lines[0])
        assert ends[members[0]].reason == (
            "Disagreed: the members differ in numeric fingerprint: rank 0, 1: a; rank 2: b"
        )

        lines[0].build(members)
        members[1].call(spoil, "rare")
        ends = disagreement(members, lines[0], verify_state=True)
        assert "the members differ in state checksum: rank 0, 2: " in ends[members[0]].reason

        # A source whose state differs: what a receiver puts together is not the state of the first source.
        lines[0].build(members)
        members[1].call(spoil, "mean")
        ends = disagreement(members, lines[0], sources=members[:2])
        assert "the members differ in state checksum" in ends[members[0]].reason
        assert [end.position for end in ends.values()] == [Position(0), Position(0), None]

        lines[0].build(members)
        lines[0].position = Position(3)
        ends = disagreement(members, lines[0])
        assert "no member holds the state of step 3" in ends[members[0]].reason


def spoil(room, name):
    """One bit of one tensor of the model, of which `rare` is the first and `mean` among the last."""
    getattr(room.model, name).detach().view(torch.int32)[:1].bitwise_xor_(1)


def test_a_torn_state_is_no_state_and_is_made_good_by_a_peer(case, truth):
    with peers(2) as members:
        line = Line(case)
        line.build(members)
        members[0].call(break_optimizer)
        line.begin(members)
        assert members[0].answered(DEADLINE_S)
        line.abandon(members[1:])
        ends = line.ends()
        assert kinds(ends)[0] is EndKind.TASK_ERROR
        assert ends[members[0]].position is None
        assert ends[members[1]].position is not None
        assert_finished(line, members, truth, members[1:])


def break_optimizer(room):
    """It fails once, half-way through its second step."""
    optimizer, calls = room.engine._optimizer, []
    step = type(optimizer).step

    def fail(*args, **options):
        calls.append(None)
        step(optimizer, *args, **options)
        if len(calls) == 2:
            raise MemoryError("no memory left")

    optimizer.step = fail


def test_everyone_reports_digests_and_only_the_narrator_steps(case, truth):
    with peers(2) as members:
        line = Line(case)
        line.build(members)
        line.run(members)
        narrated, quiet = (peer.call(tiny.reports) for peer in members)
        for items in (narrated, quiet):
            said = {item.step: item.digest for item in items if isinstance(item, StateDigest)}
            assert said == {step: digest for step, digest in truth[0].items() if step}
        steps = [[item.step for item in items if hasattr(item, "loss")] for items in (narrated, quiet)]
        assert steps == [[1, 2, 3, 4], []]


def test_a_line_goes_on_from_a_checkpoint_in_another_world(case, truth, storage):
    """Parts written by two, restored by one of three; what was told beyond is forgotten."""
    with peers(3) as members:
        line = Line(case)
        line.build(members)
        for _ in range(2):
            members[0].now(tiny.halt, line.generation + 1)
            line.run(members[:2])
        assert line.position == Position(2)
        for part, peer in enumerate(members[:2]):
            peer.call(tiny.write_checkpoint, line.generation, part, 2)
        parts = [peer.call(tiny.written_part) for peer in members[:2]]
        assert [(part.rank, part.parts, part.position, part.error) for part in parts] == [
            (0, 2, Position(2), ""),
            (1, 2, Position(2), ""),
        ]
        tiny.commit_parts(storage, parts)
        line.run(members[:2])
        assert line.position == Position(LAST)

        line.position = Position(2)
        ends = line.run(members, members[:1], restore=directory(2))
        assert kinds(ends) == [EndKind.FINISHED] * 3
        assert_whole(ends, truth)
        assert members[0].call(tiny.told) == truth[1]


@pytest.mark.parametrize("size", [1, 3])
def test_evaluation_sees_every_row_once_and_leaves_no_trace(case, truth, size):
    """Also after the last step when all are asked to halt there, and whatever forward does to buffers."""
    with peers(size) as members:
        line = Line(replace(case, evaluate_every=3))
        line.build(members)
        members[-1].call(tiny.arm, "halt", LAST - 1, 0)  # heard at the next border
        ends = line.run(members)
        assert kinds(ends) == [EndKind.FINISHED] * size
        assert {end.position for end in ends.values()} == {Position(LAST, evaluated=True)}
        assert_whole(ends, truth)
        assert members[0].call(tiny.told) == truth[1]
        done = [item for item in members[0].call(tiny.reports) if isinstance(item, EvaluationRecord)]
    assert [(record.step, record.rows) for record in done] == [(3, 11), (LAST, 11)]
    numbers = [record.metrics["error"].hex() for record in done]
    assert numbers == EVALUATED.setdefault("numbers", numbers)


EVALUATED: dict[str, list[str]] = {}
"""The numbers of the first world that evaluated."""
