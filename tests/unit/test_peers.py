"""Collectives of the task's own: the right values or a clear error, and the line of steps is what it was."""

import re
from dataclasses import replace

import pytest
import torch
from tests.unit import tiny
from tests.unit.ranks import DEADLINE_S, everywhere, form, kill_self, peers, until
from tests.unit.test_condition import conditions_once_stuck
from tests.unit.test_runner import assert_finished, assert_whole, holders
from tests.unit.tiny import Case, Line, kinds

from worldline.collective.group import ASIDE, LANES
from worldline.health.hang import diagnose
from worldline.worker.orders import EndKind
from worldline.worker.peers import HEADER_BYTES, CollectiveMismatch, GroupPeers
from worldline.world import Position

LAST = 4

# The calls themselves


def samples(rank):
    """One tensor of each kind, other numbers on every rank."""
    whole = torch.arange(12).reshape(3, 4) + rank
    return {
        "float": whole / 7,
        "transposed": (whole / 7).t(),
        "bfloat16": (whole / 7).bfloat16(),
        "long": whole - 2**40,
        "bool": whole % 2 == rank % 2,
        "complex": torch.complex(whole.float(), -whole.float()).conj(),
        "scalar": torch.tensor(rank * 0.1, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "trained": torch.nn.Parameter(torch.full((5,), float(rank))),
    }


def entered(room, rank, size, prefix):
    room.group = form(room, rank, size, prefix)
    return GroupPeers(room.group, rank, size)


def gather_all(room, rank, size, prefix):
    """What is gathered, of two steps."""
    own = entered(room, rank, size, prefix)
    gathered = []
    for step in (1, 2):
        own.open(step)
        gathered.append({name: own.gather(name, tensor) for name, tensor in samples(rank).items()})
        own.close()
    return [{name: [t.numpy(force=True) if t.dtype != torch.bfloat16 else t for t in ts]
             for name, ts in of_step.items()} for of_step in gathered]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
def test_everyone_gets_everyones_tensors_by_rank(size):
    with peers(size) as members:
        for gathered in everywhere(members, gather_all):
            for of_step in gathered:
                for name, tensors in of_step.items():
                    expected = [samples(rank)[name].detach() for rank in range(size)]
                    assert len(tensors) == size
                    for found, wanted in zip(map(torch.as_tensor, tensors), expected, strict=True):
                        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                        assert torch.equal(found, wanted.resolve_conj())


def call_differently(room, rank, size, prefix, calls):
    """calls: (name, dtype, shape) of each call, by rank. The errors of all, then what a common call gives."""
    own = entered(room, rank, size, prefix)
    own.open(17)
    errors = []
    for name, dtype, shape in calls[rank]:
        try:
            own.gather(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
        except CollectiveMismatch as error:
            errors.append(str(error))
    common = own.gather("common", torch.tensor(rank))
    own.close()
    return errors, [int(value) for value in common]


A, B = ("a", "float32", (3,)), ("b", "float32", (3,))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        # Swapped: the backend alone would exchange them without a word.
        ([[A, B], [A, B], [B, A]], ["'a', float32[3]", "'b', float32[3]"]),
        # Other shapes and dtypes: the backend alone would end the process.
        ([[A], [A], [("a", "float32", (300, 70))]], ["'a', float32[3]", "'a', float32[300, 70]"]),
        ([[A], [A], [("a", "float64", (3,))]], ["'a', float32[3]", "'a', float64[3]"]),
    ],
    ids=["swapped", "shape", "dtype"],
)
def test_calls_that_differ_say_who_called_what_and_end_nobody(calls, said):
    with peers(3) as members:
        results = everywhere(members, call_differently, calls)
    assert results[0] == results[1] == results[2]
    errors, common = results[0]
    assert common == [0, 1, 2]
    assert len(errors) == len(calls[0])
    assert errors[0] == (
        "the workers called different collectives after step 17: "
        f"ranks 0 and 1: gather({said[0]}), call 1 in the generation; "
        f"rank 2: gather({said[1]}), call 1 in the generation. "
        "All must call the same ones, in the same order, with tensors of the same dtype and shape"
    )


def test_what_cannot_be_gathered_is_refused():
    alone = GroupPeers(None, 0, 1)
    with pytest.raises(RuntimeError, match="in after_step only"):
        alone.gather("a", torch.zeros(1))
    alone.open(1)
    assert alone.gather("a" * 500, torch.zeros(1))[0].tolist() == [0]
    with pytest.raises(ValueError, match=f"{HEADER_BYTES} are the most"):
        alone.gather("a" * HEADER_BYTES, torch.zeros(1))
    with pytest.raises(TypeError, match=r"gather\('loss'\): expected a dense tensor, got float"):
        alone.gather("loss", 0.5)
    with pytest.raises(TypeError, match="dense"):
        alone.gather("a", torch.zeros(2, 2).to_sparse())
    alone.close()
    with pytest.raises(RuntimeError, match="in after_step only"):
        alone.gather("a", torch.zeros(1))


# In a run


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    storage = str(tmp_path_factory.mktemp("storage"))
    return Case(loss="weighted", last_step=LAST, storage=storage, watched=False)


@pytest.fixture(scope="module")
def truth(case):
    with peers(1) as (alone,):
        line = Line(case)
        line.build([alone])
        digests = {0: alone.call(tiny.state_digest)}
        line.run([alone])
        records = alone.call(tiny.told)
    return digests | {record[0]: record[5] for record in records}, records


def with_hook(case, hook):
    return replace(case, after=hook)


def compare(room, step, peers):
    """Every worker's state, as all see it; and it draws, which no step may notice."""
    torch.rand(step)
    digest = int(tiny.state_digest(room)[:15], 16)
    everyones = [int(d) for d in peers.gather("digest", torch.tensor(digest))]
    room.seen = [*getattr(room, "seen", []), (step, room.engine.phase, everyones)]


def seen(room):
    return getattr(room, "seen", [])


def test_it_is_called_after_every_step_with_the_state_whole_and_the_line_is_the_same(case, truth):
    """In worlds that change: not for a step that a newcomer takes over."""
    with peers(3) as members:
        line = Line(with_hook(case, compare))
        line.build(members)
        members[0].now(tiny.halt, 1)
        ends = line.run(members[:2])
        assert kinds(ends) == [EndKind.HALTED] * 2
        assert_finished(line, members, truth, holders(ends, line))

        def said(steps, sizes):
            digests = [int(truth[0][step][:15], 16) for step in steps]
            return [
                (step, "after_step", [digest] * size)
                for step, digest, size in zip(steps, digests, sizes, strict=True)
            ]

        assert members[0].call(seen) == said([1, 2, 3, 4], [2, 3, 3, 3])
        assert members[2].call(seen) == said([2, 3, 4], [3, 3, 3])


def lanes(room):
    group = room.runner._group
    aside = [o.kind for o in group.log.entered() if o.lane == ASIDE]
    return len(group._lanes), aside


def only_after_the_third(room, step, peers):
    if step == 3:
        peers.gather("a", torch.zeros(1))


def nothing(room, step, peers):
    pass


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (None, (LANES, [])),
        (nothing, (LANES, [])),
        (only_after_the_third, (LANES + 1, ["connect", "all_to_all", "all_to_all"])),
    ],
)
def test_the_lane_is_connected_only_where_it_is_used(case, hook, expected):
    with peers(2) as members:
        line = Line(with_hook(case, hook))
        line.build(members)
        assert set(kinds(line.run(members))) == {EndKind.FINISHED}
        assert [peer.call(lanes) for peer in members] == [expected] * 2


def fail_on_rank_1(room, step, peers):
    compare(room, step, peers)
    if step == 2 and peers.rank == 1:
        raise ValueError("what I see is wrong")


def test_an_error_in_it_is_the_tasks_and_the_step_stays_completed(case, truth):
    with peers(2) as members:
        line = Line(with_hook(case, fail_on_rank_1))
        line.build(members)
        line.begin(members)
        assert members[1].answered(DEADLINE_S)
        line.abandon(members[:1])
        ends = line.ends()
        assert kinds(ends) == [EndKind.BROKEN, EndKind.TASK_ERROR]
        assert ends[members[1]].reason == "ValueError: what I see is wrong"
        assert "fail_on_rank_1" in ends[members[1]].traceback
        assert {end.position for end in ends.values()} == {Position(2)}
        assert_whole(ends, truth)
        assert_finished(line, members, truth)
        assert [step for step, _, _ in members[1].call(seen)] == [1, 2, 3, 4]


def mismatch(room, step, peers):
    peers.gather("a" if peers.rank else "b", torch.zeros(2))


def test_calls_that_differ_end_the_generation_alike_everywhere(case, truth):
    with peers(2) as members:
        line = Line(with_hook(case, mismatch))
        line.build(members)
        ends = line.run(members)
        assert kinds(ends) == [EndKind.TASK_ERROR] * 2
        assert len({end.reason for end in ends.values()}) == 1
        assert ends[members[0]].reason.startswith(
            "CollectiveMismatch: the workers called different collectives after step 1: rank 0: gather('b', "
        )
        assert_whole(ends, truth)


def die_after_the_second(room, step, peers):
    """The others take the error for one of their own."""
    if step == 2 and room.dies:
        kill_self()
    try:
        compare(room, step, peers)
    except Exception as error:
        room.caught = type(error).__name__
        if room.dies is None:
            raise RuntimeError("something went wrong") from error


def set_dies(room, dies):
    room.dies = dies


def caught(room):
    return room.caught


def test_a_peer_that_dies_meanwhile_is_no_error_of_the_task(case, truth):
    """Whether the task swallows what it gets or raises something else."""
    with peers(3) as members:
        line = Line(with_hook(case, die_after_the_second))
        line.build(members)
        for peer, dies in zip(members, (False, None, True), strict=True):
            peer.call(set_dies, dies)
        line.begin(members)
        assert members[2].answered(DEADLINE_S)
        line.members = survivors = members[:2]
        ends = line.ends()
        assert kinds(ends) == [EndKind.BROKEN] * 2, ends
        assert [peer.call(caught) for peer in survivors] == ["CollectiveFailed"] * 2
        assert {end.position for end in ends.values()} == {Position(2)}
        assert_whole(ends, truth)
        assert_finished(line, survivors, truth)


def skip_on_the_last_rank(room, step, peers):
    if step != room.skipped_step or peers.rank < peers.size - 1:
        peers.gather("norm", torch.zeros(4))


def skip_at(room, step):
    room.skipped_step = step


@pytest.mark.parametrize(("size", "step"), [(3, 1), (3, 2), (2, 2)])
def test_a_rank_that_skips_a_call_is_named_by_its_line(case, truth, size, step):
    """Also the first call, where the others wait to be connected; with two ranks both are named."""
    with peers(size) as members:
        line = Line(with_hook(case, skip_on_the_last_rank))
        line.build(members)
        for peer in members:
            peer.call(skip_at, step)
        line.begin(members)
        skips = size - 1
        until(lambda: members[skips].now(tiny.condition, line.generation).step == step)
        conditions = conditions_once_stuck(members, line.generation, members)
        verdict = diagnose(conditions, line.generation)
        call, number = ("connect", 0) if step == 1 else ("all_to_all", 3)
        call += f" gather 'norm' after step {step}"
        waiting = rf"{call} \(operation {number} of lane {ASIDE}, "
        next_step = rf"waits in all_to_all words of step {step + 1} \(.*, at .*tiny\.py:\d+ in run_order"
        assert re.search(r"test_peers\.py:\d+ in skip_on_the_last_rank$", conditions[0].where)
        if size == 2:
            assert (verdict.culprits, verdict.tied) == ((0, 1), True)
            assert re.search(rf"rank 0 waits in {waiting}.*, at .*test_peers\.py:", verdict.text, re.I)
            assert re.search(f"rank 1 {next_step}", verdict.text)
        else:
            assert (verdict.culprits, verdict.tied) == ((skips,), False)
            assert re.search(rf"^Ranks 0 and 1 wait in {waiting}", verdict.text)
            assert re.search(f"Rank {skips} has not entered {call}: it {next_step}", verdict.text)
        line.abandon(members)
        ends = line.ends()
        assert set(kinds(ends)) == {EndKind.BROKEN}
        assert {end.position for end in ends.values()} == {Position(step)}
        assert_whole(ends, truth)


def test_a_rank_that_skips_the_very_last_call_is_named_though_it_has_ended(case, truth):
    with peers(3) as members:
        line = Line(with_hook(case, skip_on_the_last_rank))
        line.build(members)
        for peer in members:
            peer.call(skip_at, LAST)
        line.begin(members)
        assert members[2].answered(DEADLINE_S)
        waiting = members[:2]
        until(lambda: all(peer.now(tiny.condition, 1).phase == "after_step" for peer in waiting))
        until(lambda: all(peer.now(tiny.condition, 1).waits_in for peer in waiting))
        verdict = diagnose({r: peer.now(tiny.condition, 1) for r, peer in enumerate(members)}, 1)
        assert verdict.culprits == (2,)
        stopped = "gather 'norm' after step 4: it has stopped training with the others"
        assert verdict.reasons[2].endswith(stopped)
        line.abandon(waiting)
        ends = line.ends()
        assert kinds(ends) == [EndKind.BROKEN, EndKind.BROKEN, EndKind.FINISHED]
        assert_whole(ends, truth)
