import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldline.data.block import Block, Columns
from worldline.data.loader import Loader, MicroBatch, ReadCancelled
from worldline.data.manifest import DataError, FileEntry, Manifest
from worldline.data.plan import Plan, WindowKey
from worldline.world import assign

WAIT_S = 30.0


def plan(rows: tuple[int, ...] = (7, 1, 13, 2, 8, 60), **changes: Any) -> Plan:
    entries = tuple(FileEntry(f"part-{i}.parquet", 1, (n,), "") for i, n in enumerate(rows))
    given: dict[str, Any] = {"seed": 3, "num_shards": 8, "rows_per_shard": 2, "window_rows": 5}
    return Plan(Manifest(entries, (("id", "int64"),), "/data"), **(given | changes))


class Source:
    """Makes each window's rows from their ids. asked: keys in the order in which they were fetched."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.asked: queue.Queue[WindowKey] = queue.Queue()

    def fetch(self, key: WindowKey, timeout_s: float) -> Block:
        self.asked.put(key)
        ids = self.plan.window(*key).row_ids
        columns: Columns = {
            "id": ids,
            "image": np.repeat(ids, 6).reshape(-1, 2, 3).astype(np.float32),
            "name": np.array([f"row {i}" for i in ids], dtype=object),
        }
        return Block(columns, ids)

    def next_asked(self, n: int) -> list[WindowKey]:
        return [self.asked.get(timeout=WAIT_S) for _ in range(n)]


@contextmanager
def running(plan: Plan, source: Any = None, micro_rows: int = 2, **settings: Any) -> Iterator[Loader]:
    loader = Loader(plan, source or Source(plan), micro_rows, **settings)
    try:
        yield loader
    finally:
        loader.close()


def rows(batches: list[MicroBatch]) -> list[int]:
    for batch in batches:
        assert isinstance(batch.columns["id"], torch.Tensor)
        assert batch.columns["id"].tolist() == batch.row_ids.tolist()
        assert batch.columns["image"][:, 1, 2].tolist() == batch.row_ids.tolist()
        assert batch.columns["name"].tolist() == [f"row {i}" for i in batch.row_ids]
    return [row for batch in batches for row in batch.row_ids.tolist()]


def planned(plan: Plan, step: int, shard: int) -> list[int]:
    epoch, _ = plan.locate(step)
    parts = [plan.window(epoch, shard, i).row_ids[a:b].tolist() for i, a, b in plan.window_span(step, shard)]
    return [row for part in parts for row in part]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_any_split_of_the_shards_gives_the_same_rows(replicas: int, prefetch: int) -> None:
    p = plan(rows_per_shard=3, window_rows=4)
    seen: dict[tuple[int, int], list[int]] = {}
    steps = range(1, 2 * p.steps_per_epoch + 1)
    for share in assign(8, replicas):
        with running(p, prefetch=prefetch) as loader:
            loader.focus(share.shards, 1)
            for step in steps:
                seen |= {(step, shard): rows(loader.batches(step, shard)) for shard in share.shards}
    assert seen == {(step, shard): planned(p, step, shard) for step in steps for shard in range(8)}
    for epoch in range(2):
        here = [row for (step, _), ids in seen.items() if p.locate(step)[0] == epoch for row in ids]
        assert sorted(here) == list(range(91))


STEP = st.integers(1, 20)
FOCUS = st.tuples(st.integers(0, 7), st.integers(1, 8), STEP, st.integers(0, 3), STEP)


@settings(max_examples=40)
@given(st.lists(FOCUS, min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 4))
def test_any_history_of_focus_gives_the_same_rows(
    history: list[tuple[int, int, int, int, int]], prefetch: int, micro_rows: int
) -> None:
    """Resizes to anything, back and forth, steps repeated and passed over."""
    p = plan(rows_per_shard=3, window_rows=4)
    with running(p, micro_rows=micro_rows, prefetch=prefetch) as loader:
        for first, count, step, more, expected in history:
            shards = range(first, min(8, first + count))
            loader.expect(shards, expected)
            loader.focus(shards, step)
            for now in [*range(step, step + more + 1), step]:
                assert {s: rows(loader.batches(now, s)) for s in shards} == {
                    s: planned(p, now, s) for s in shards
                }


def test_micro_batches_cut_the_step_in_order() -> None:
    p = plan((40,), num_shards=2, rows_per_shard=7, window_rows=5)
    with running(p, micro_rows=3) as loader:
        loader.focus(range(2), 1)
        batches = loader.batches(1, 0)
        assert [batch.num_rows for batch in batches] == [3, 3, 1]
        assert rows(batches) == planned(p, 1, 0)
        assert [batch.num_rows for batch in loader.batches(3, 0)] == [3, 3]


def test_no_rows_no_batches() -> None:
    p = plan((9,), num_shards=8, rows_per_shard=1, window_rows=5)
    with running(p) as loader:
        loader.focus(range(8), 1)
        assert [len(loader.batches(2, shard)) for shard in range(8)] == [1, 0, 0, 0, 0, 0, 0, 0]
    short = plan((3,), allow_short=True)
    with running(short) as loader:
        loader.focus(range(4, 8), 1)
        assert loader.batches(1, 7) == []


def test_batches_are_the_callers_own() -> None:
    p = plan()
    with running(p) as loader:
        loader.focus(range(1), 1)
        batch = loader.batches(1, 0)[0]
        assert isinstance(batch.columns["image"], torch.Tensor)
        batch.columns["image"].zero_()
        batch.row_ids[:] = 0
        assert rows(loader.batches(1, 0)) == planned(p, 1, 0)


def test_reads_ahead_in_the_order_of_need_and_once() -> None:
    p = plan((96,), num_shards=4, rows_per_shard=2, window_rows=4)
    source = Source(p)
    with running(p, source) as loader:
        loader.focus(range(1, 3), 1)
        ahead = [WindowKey(0, 1, 0), WindowKey(0, 2, 0), WindowKey(0, 1, 1), WindowKey(0, 2, 1)]
        assert source.next_asked(4) == ahead
        for step in (1, 2):
            for shard in (1, 2):
                loader.batches(step, shard)
        loader.batches(3, 1)
        assert source.next_asked(1) == [WindowKey(0, 1, 2)]
        # Shard 2 stays and is not read again; shard 1 went; shard 3 came.
        loader.focus(range(2, 4), 3)
        assert sorted(source.next_asked(3)) == [WindowKey(0, 2, 2), WindowKey(0, 3, 1), WindowKey(0, 3, 2)]
        assert source.asked.empty()


def test_what_is_expected_is_there_when_the_focus_comes_to_it() -> None:
    p = plan((96,), num_shards=4, rows_per_shard=2, window_rows=4)
    source = Source(p)
    with running(p, source) as loader:
        loader.focus(range(1), 1)
        source.next_asked(2)
        loader.expect(range(3), 1)
        expected = [WindowKey(0, shard, window) for window in (0, 1) for shard in (1, 2)]
        assert source.next_asked(4) == expected
        assert rows(loader.batches(2, 0)) == planned(p, 2, 0)  # what is trained meanwhile is no matter
        loader.focus(range(1, 3), 2)
        for shard in (1, 2):
            assert rows(loader.batches(2, shard)) == planned(p, 2, shard)
        assert source.asked.empty()
        assert {key.shard for key in loader._held} == {1, 2}


def test_only_the_newest_expectation_counts() -> None:
    p = plan((96,), num_shards=4, rows_per_shard=2, window_rows=4)
    source = Source(p)
    with running(p, source, prefetch=0) as loader:
        loader.expect(range(2), 1)
        source.next_asked(2)
        loader.expect(range(2, 3), 5)
        assert source.next_asked(1) == [WindowKey(0, 2, 2)]
        loader.focus(range(2, 3), 5)
        assert rows(loader.batches(5, 2)) == planned(p, 5, 2)
        assert set(loader._held) == {WindowKey(0, 2, 2)}


def test_reads_ahead_over_the_border_of_the_epoch() -> None:
    p = plan((16,), num_shards=2, rows_per_shard=4, window_rows=4)
    source = Source(p)
    with running(p, source) as loader:
        loader.focus(range(1), 2)
        assert source.next_asked(2) == [WindowKey(0, 0, 1), WindowKey(1, 0, 0)]


def test_reads_nothing_beyond_the_last_step() -> None:
    p = plan((16,), num_shards=2, rows_per_shard=4, window_rows=4)
    source = Source(p)
    with running(p, source, last_step=2, prefetch=3) as loader:
        loader.focus(range(2), 1)
        for step, shard in [(1, 0), (1, 1), (2, 0), (2, 1), (1, 0)]:
            loader.batches(step, shard)
        assert {key.epoch for key in source.next_asked(4)} == {0}
        loader.batches(3, 0)
        assert source.next_asked(2)[-1].epoch == 1


def test_holds_only_what_is_wanted() -> None:
    p = plan((800,), num_shards=8, rows_per_shard=2, window_rows=5)
    with running(p) as loader:
        loader.focus(range(8), 1)
        for step in range(1, p.steps_per_epoch + 1):
            for shard in range(8):
                loader.batches(step, shard)
            assert len(loader._held) <= 8 * 3
        loader.focus(range(0), 1)
        assert not loader._held


def test_lists_of_other_lengths_in_the_next_window_become_objects() -> None:
    p = plan((20,), num_shards=1, rows_per_shard=4, window_rows=3)

    class Lists(Source):
        def fetch(self, key: WindowKey, timeout_s: float) -> Block:
            ids = self.plan.window(*key).row_ids
            return Block({"list": np.repeat(ids, key.window + 1).reshape(len(ids), -1)}, ids)

    with running(p, Lists(p), micro_rows=4) as loader:
        loader.focus(range(1), 1)
        batch = loader.batches(1, 0)[0]
        assert [row.tolist() for row in batch.columns["list"]] == [
            [row] * (1 if i < 3 else 2) for i, row in enumerate(batch.row_ids)
        ]


class Failing(Source):
    """Fails on chosen windows until told otherwise."""

    def __init__(self, plan: Plan, bad: set[WindowKey]) -> None:
        super().__init__(plan)
        self.bad = bad

    def fetch(self, key: WindowKey, timeout_s: float) -> Block:
        block = super().fetch(key, timeout_s)
        if key in self.bad:
            raise OSError(f"no storage for {key}")
        return block


def test_errors_of_the_thread_surface_where_the_rows_are_needed() -> None:
    p = plan((80,), num_shards=2, rows_per_shard=5, window_rows=5)
    source = Failing(p, {WindowKey(0, 0, 1)})
    with running(p, source) as loader:
        loader.focus(range(2), 1)
        for shard in range(2):
            assert rows(loader.batches(1, shard)) == planned(p, 1, shard)
        assert rows(loader.batches(2, 1)) == planned(p, 2, 1)
        for _ in range(2):
            with pytest.raises(OSError, match="no storage"):
                loader.batches(2, 0)
        source.bad = set()
        assert rows(loader.batches(2, 0)) == planned(p, 2, 0)


def test_rows_that_were_not_planned_are_refused() -> None:
    p = plan((80,), num_shards=2, rows_per_shard=5, window_rows=5)

    class Wrong(Source):
        def fetch(self, key: WindowKey, timeout_s: float) -> Block:
            return super().fetch(key._replace(shard=1 - key.shard), timeout_s)

    with running(p, Wrong(p)) as loader:
        loader.focus(range(2), 1)
        with pytest.raises(DataError, match=r"shard=0, window=0.*other rows came"):
            loader.batches(1, 0)


def test_waiting_ends_at_the_deadline_and_says_for_what() -> None:
    p = plan((80,), num_shards=2, rows_per_shard=5, window_rows=5)
    release = threading.Event()

    class Stuck(Source):
        def fetch(self, key: WindowKey, timeout_s: float) -> Block:
            release.wait(WAIT_S)
            return super().fetch(key, timeout_s)

    with running(p, Stuck(p)) as loader:
        loader.focus(range(2), 3)
        with pytest.raises(
            DataError, match=r"window 2 of shard 1 \(epoch 0, from part-0.parquet\) did not come"
        ):
            loader.batches(3, 1, timeout_s=0.01)
        release.set()
        assert rows(loader.batches(3, 1)) == planned(p, 3, 1)


def test_closed_loader_gives_nothing() -> None:
    p = plan()
    with running(p) as loader:
        loader.close()
        with pytest.raises(DataError, match="closed"):
            loader.batches(1, 0)
        assert not loader._thread.is_alive()


def test_steps_in_order_move_windows_in_order() -> None:
    p = plan((400,), num_shards=2, rows_per_shard=3, window_rows=7)
    source = Source(p)
    with running(p, source) as loader:
        loader.focus(range(1), 1)
        for step in range(1, p.steps_per_epoch + 1):
            loader.batches(step, 0)
        asked = source.next_asked(p.num_windows(0))
        assert all(a < b for a, b in pairwise(asked))


def test_a_wait_for_rows_ends_on_order_and_the_rows_come_to_who_asks_again() -> None:
    a_plan = plan()
    may_go_on = threading.Event()

    class Slow(Source):
        def fetch(self, key: WindowKey, timeout_s: float) -> Block:
            assert may_go_on.wait(WAIT_S)
            return super().fetch(key, timeout_s)

    with running(a_plan, Slow(a_plan)) as loader:
        with pytest.raises(ReadCancelled):
            loader.batches(1, 0, cancelled=lambda: True)
        may_go_on.set()
        assert rows(loader.batches(1, 0)) == planned(a_plan, 1, 0)
