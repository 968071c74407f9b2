"""Schedule, optimizer and random numbers do not know the world: what one wrote, any other goes on with."""

from dataclasses import replace

import pytest
from tests.unit import tiny
from tests.unit.ranks import everywhere, peers
from tests.unit.tiny import Case, Line, kinds

from worldline.checkpoint.manifest import directory
from worldline.worker.orders import EndKind
from worldline.world import Position

LAST = 5
RATES = [0.05 * 0.5 ** ((step - 1) // 2) for step in range(1, LAST + 1)]


@pytest.fixture
def case(tmp_path):
    return Case(loss="weighted", last_step=LAST, storage=str(tmp_path))


def rates(records):
    return [float.fromhex(record[6]["lr"]) for record in records]


def stop_at(line, members, step):
    """Let `members` go on to `step`."""
    while line.position.step < step:
        members[0].now(tiny.halt, line.generation + 1)
        assert kinds(line.run(members)) == [EndKind.HALTED] * len(members)


@pytest.mark.parametrize("worlds", [(1,), (2,), (4,), (2, 4)], ids=str)
def test_the_schedule_ticks_once_a_step(case, worlds):
    with peers(max(worlds)) as processes:
        line = Line(case)
        line.build(processes)
        members = processes[: worlds[0]]
        stop_at(line, members, 2)
        ends = line.run(processes[: worlds[-1]], sources=members)
        assert kinds(ends) == [EndKind.FINISHED] * worlds[-1]
        assert rates(members[0].call(tiny.told)) == RATES


def test_a_checkpoint_of_four_goes_on_in_worlds_of_any_size(case):
    """Moments, schedule and weights, by the digest of each step; and written again it is the same."""
    with peers(4) as processes:
        line = Line(case)
        line.build(processes)
        stop_at(line, processes, 2)
        for part, peer in enumerate(processes):
            peer.call(tiny.write_checkpoint, line.generation, part, 4)
        parts = [peer.call(tiny.written_part) for peer in processes]
        moments = {name for part in parts for name in part.part.tensors if "/exp_avg" in name}
        assert len(moments) > 8
        assert min(len(part.part.tensors) for part in parts) > 0
        tiny.commit_parts(case.storage, parts)
        line.run(processes)
        undisturbed = processes[0].call(tiny.told)
        assert rates(undisturbed) == RATES
        for size in (3, 2, 1, 4):
            line.build(processes)
            line.position = Position(2)
            members = processes[:size]
            ends = line.run(members, members[:1], restore=directory(2))
            assert kinds(ends) == [EndKind.FINISHED] * size
            assert members[0].call(tiny.told) == undisturbed[2:]
            assert {peer.call(tiny.state_digest) for peer in members} == {undisturbed[-1][5]}


def test_members_with_other_rows_are_told_apart_by_name(case):
    with peers(3) as members:
        line, other = Line(case), Line(replace(case, rows=case.rows + 8))
        other.prefix = line.prefix
        line.build(members[:2])
        other.build(members[2:])
        ends = line.run(members)
        assert kinds(ends) == [EndKind.DISAGREED] * 3
        (reason,) = {end.reason for end in ends.values()}
        assert reason.startswith("Disagreed: the members differ in plan fingerprint: rank 0, 1: ")
        assert "; rank 2: " in reason
        assert {end.position for end in ends.values()} == {Position(0)}


def masks(room, rank, size, prefix, case, steps):
    """(step, mask) of every dropout that this rank drew, in its order."""
    tiny.build(room, case)
    drawn = []

    def note(module, inputs, output):
        drawn.append((room.engine.completed + 1, (output == 0).numpy().tobytes()))

    room.model.drop.register_forward_hook(note)
    tiny.go_on(room, rank, size, prefix, steps)
    return drawn


def test_dropout_masks_belong_to_the_shard_and_not_to_who_computes_it():
    """So they differ between ranks, and are the same in any world."""
    case = Case(rows=8 * 16)
    with peers(4) as processes:
        (alone,) = everywhere(processes[:1], masks, case, 3)
        assert len(set(alone)) == len(alone) == 3 * tiny.SHARDS * 2
        for size in (2, 3, 4):
            drawn = everywhere(processes[:size], masks, case, 3)
            together = [mask for step in (1, 2, 3) for rank in drawn for mask in rank if mask[0] == step]
            assert together == alone
