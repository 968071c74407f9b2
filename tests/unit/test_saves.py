"""Checkpoints from parts: committed when whole and told of, never of parts that do not belong together."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldline.checkpoint.manifest import directory, part_name
from worldline.checkpoint.part import write_part
from worldline.checkpoint.restore import find
from worldline.control.saves import Saves
from worldline.storage import open_storage
from worldline.worker.orders import CheckpointPart
from worldline.world import Position


class Bench:
    def __init__(self, folder, may_write=lambda: True, before_commit=lambda: None):
        self.storage = open_storage(str(folder))
        self.ended = []
        self.saves = Saves(
            self.storage,
            every_steps=10,
            keep=3,
            job_digest="job",
            plan_fingerprint="plan",
            numeric_fingerprint={"torch": "2"},
            attempt=1,
            post=self.ended.append,
            before_commit=before_commit,
            may_write=may_write,
            warn=lambda text: None,
        )

    def part(self, step, rank, parts, generation=1, digest="a" * 64, error=""):
        info = None
        if not error:
            name = part_name(1, generation, rank)
            info = write_part(self.storage, directory(step), name, {f"p{rank}": torch.tensor([step])})
        return CheckpointPart(generation, rank, parts, Position(step), digest, {}, info, error, 0.5)

    def settled(self):
        assert self.saves.settle(10)
        return [(signal.step, signal.error) for signal in self.ended]

    def newest(self):
        manifest = find(self.storage, warn=lambda text: None)
        return manifest and (manifest.step, manifest.generation)


@pytest.fixture
def make(tmp_path):
    benches = []

    def make(**options):
        benches.append(Bench(tmp_path, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.saves.close(10)


def test_committed_when_the_last_part_and_the_last_step_are_there(make):
    bench = make()
    bench.saves.offer(bench.part(10, 1, 2))
    assert bench.saves.pending(10)
    bench.saves.offer(bench.part(10, 0, 2))
    assert bench.settled() == []
    assert bench.saves.pending(10)
    bench.saves.reached(9)
    assert bench.settled() == []
    bench.saves.reached(10)
    assert bench.settled() == [(10, "")]
    assert bench.saves.committed == 10
    assert not bench.saves.pending(10)
    assert bench.newest() == (10, 1)
    assert bench.ended[0].seconds >= 0.5


def test_parts_of_different_generations_never_meet(make):
    bench = make()
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 2, generation=1))
    bench.saves.offer(bench.part(10, 1, 2, generation=2))
    assert bench.settled() == []
    bench.saves.offer(bench.part(10, 0, 2, generation=2))
    assert bench.settled() == [(10, "")]
    assert bench.newest() == (10, 2)


def test_what_was_forgotten_stays_forgotten(make):
    bench = make()
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 2))
    bench.saves.forget(1)
    assert not bench.saves.pending(10)
    bench.saves.offer(bench.part(10, 1, 2))
    assert not bench.saves.pending(10), "a late part does not wait for one that never comes"


def test_a_checkpoint_that_is_due_and_does_not_come_is_overdue(make):
    bench = make()
    assert [step for step in (0, 9, 10, 19) if bench.saves.overdue(step)] == [10, 19]
    bench.saves.offer(bench.part(10, 0, 2))
    assert not bench.saves.overdue(10), "it is on its way"
    bench.saves.forget(1)
    assert bench.saves.overdue(10), "and does not come, whether its parts were told or not"
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 1, generation=2))
    assert not bench.saves.overdue(19)
    assert bench.settled() == [(10, "")]
    assert [step for step in (10, 19, 20) if bench.saves.overdue(step)] == [20]
    bench.saves.rewind(13, durable=True)
    assert not bench.saves.overdue(13)


def test_a_part_that_failed_fails_the_checkpoint_and_not_the_next(make):
    bench = make()
    bench.saves.reached(20)
    bench.saves.offer(bench.part(10, 0, 2))
    bench.saves.offer(bench.part(10, 1, 2, error="disk full"))
    bench.saves.offer(bench.part(20, 0, 1))
    assert bench.settled() == [(10, "rank 1: disk full"), (20, "")]
    assert bench.newest() == (20, 1)


def test_states_that_differ_are_no_checkpoint(make):
    bench = make()
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 2))
    bench.saves.offer(bench.part(10, 1, 2, digest="b" * 64))
    [(step, error)] = bench.settled()
    assert step == 10
    assert "the members' states differ" in error
    assert bench.saves.committed == -1


def test_who_lost_the_run_commits_nothing(make):
    bench = make(may_write=lambda: False)
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 1))
    assert bench.settled() == [(10, "another driver has taken the run")]
    assert bench.storage.list("checkpoints/") == ["checkpoints/step-00000010/a1-g1-r0.safetensors"]


def test_any_error_is_told_and_the_thread_lives(make):
    failures = [OSError("bad file descriptor")]

    def fail_once():
        if failures:
            raise failures.pop()

    bench = make(before_commit=fail_once)
    bench.saves.reached(20)
    bench.saves.offer(bench.part(10, 0, 1))
    bench.saves.offer(bench.part(20, 0, 1))
    assert bench.settled() == [(10, "bad file descriptor"), (20, "")]


def test_the_log_is_synced_before_the_commit(make):
    seen = []
    bench = make(before_commit=lambda: seen.append(bench.storage.list("checkpoints/")))
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 1))
    bench.settled()
    assert seen == [["checkpoints/step-00000010/a1-g1-r0.safetensors"]]


def test_settling_waits_for_a_commit_and_not_for_ever(make):
    go_on, begun = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert go_on.wait(10)

    bench = make(before_commit=wait)
    bench.saves.reached(10)
    bench.saves.offer(bench.part(10, 0, 1))
    assert begun.wait(10)
    assert not bench.saves.settle(0.01)
    go_on.set()
    assert bench.settled() == [(10, "")]


def test_after_a_rewind_what_is_durable_is_what_was_found(make):
    bench = make()
    bench.saves.reached(20)
    bench.saves.offer(bench.part(20, 0, 1))
    bench.settled()
    bench.saves.offer(bench.part(30, 0, 1))
    bench.saves.rewind(10, durable=True)
    assert bench.saves.committed == 10
    assert not bench.saves.pending(30)
    bench.saves.rewind(0, durable=False)
    assert bench.saves.committed == -1


@settings(deadline=None)  # it writes files
@given(st.data())
def test_any_order_of_parts_commits_only_what_is_whole(tmp_path_factory, data):
    bench = Bench(tmp_path_factory.mktemp("saves"))
    sizes = {(generation, 10 * generation): generation for generation in (1, 2, 3)}
    every = [(g, step, rank) for (g, step), parts in sizes.items() for rank in range(parts)]
    lost = data.draw(st.sets(st.sampled_from(every)))
    order = data.draw(st.permutations([part for part in every if part not in lost]))
    for part in [bench.part(step, rank, sizes[g, step], g) for g, step, rank in order]:
        bench.saves.offer(part)
    bench.saves.reached(30)
    ended = [step for step, _ in bench.settled()]
    whole = [step for g, step in sizes if not any(part[0] == g for part in lost)]
    assert sorted(ended) == whole
    assert bench.saves.committed == max(whole, default=-1)
    if whole:
        assert bench.newest() == (max(whole), max(whole) // 10)
    bench.saves.close(10)
