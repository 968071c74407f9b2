import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldline.data.manifest import DataError, FileEntry, Manifest
from worldline.data.plan import Need, Plan, WindowKey


def manifest(*files: tuple[int, ...], root: str = "/data") -> Manifest:
    entries = [
        FileEntry(f"part-{i}.parquet", 1000 + i, groups, f"digest{i}") for i, groups in enumerate(files)
    ]
    return Manifest(tuple(entries), (("x", "float"), ("id", "int64")), root)


def plan(files: Manifest, **changes: Any) -> Plan:
    given: dict[str, Any] = {"seed": 1, "num_shards": 8, "rows_per_shard": 2, "window_rows": 5}
    return Plan(files, **(given | changes))


def rows_of(plan: Plan, step: int, shard: int) -> list[int]:
    """Row ids of a shard in a step, straight from the windows."""
    epoch, _ = plan.locate(step)
    rows: list[int] = []
    for index, start, stop in plan.window_span(step, shard):
        rows += plan.window(epoch, shard, index).row_ids[start:stop].tolist()
    return rows


FILES = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=4).map(tuple), min_size=1, max_size=5).map(
    lambda files: manifest(*files)
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    files = draw(FILES.filter(lambda m: m.num_rows > 0))
    return Plan(
        files,
        seed=draw(st.integers(0, 2**63 - 1)),
        num_shards=draw(st.sampled_from([1, 2, 4, 8, 16])),
        rows_per_shard=draw(st.integers(1, 9)),
        window_rows=draw(st.integers(1, 30)),
        shuffle=draw(st.booleans()),
        allow_short=True,
    )


@given(plans())
def test_each_row_exactly_once_an_epoch(plan: Plan) -> None:
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch + 1, (epoch + 1) * plan.steps_per_epoch + 1)
        assert [plan.locate(step) for step in steps] == [(epoch, i) for i in range(plan.steps_per_epoch)]
        seen = [
            row for step in steps for shard in range(plan.num_shards) for row in rows_of(plan, step, shard)
        ]
        assert sorted(seen) == list(range(plan.manifest.num_rows))


@given(plans())
def test_only_the_last_step_of_an_epoch_is_short(plan: Plan) -> None:
    for step in range(1, plan.steps_per_epoch + 1):
        rows = plan.step_rows(step)
        assert rows == tuple(len(rows_of(plan, step, shard)) for shard in range(plan.num_shards))
        assert sum(rows) > 0
        if step < plan.steps_per_epoch:
            assert rows == (plan.rows_per_shard,) * plan.num_shards
    assert sum(sum(plan.step_rows(s)) for s in range(1, plan.steps_per_epoch + 1)) == plan.manifest.num_rows


@given(plans())
def test_windows_cover_each_segment_and_stay_small(plan: Plan) -> None:
    for shard in range(plan.num_shards):
        windows = list(plan.windows(0, shard))
        sizes = [window.num_rows for window in windows]
        first, stop = plan.segment(shard)
        assert sum(sizes) == stop - first
        assert all(size == plan.window_rows for size in sizes[:-1])
        assert all(piece.start < piece.stop for window in windows for piece in window.pieces)
        for window in windows:
            assert (
                window.row_ids.tolist()
                == [
                    row
                    for p in window.pieces
                    for row in range(p.first_row_id, p.first_row_id + p.stop - p.start)
                ]
                or plan.shuffle
            )


@given(plans(), st.data())
def test_order_of_need_is_the_order_in_which_steps_meet_windows(plan: Plan, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, 2 * plan.steps_per_epoch))
    last = data.draw(st.integers(first, 3 * plan.steps_per_epoch))
    met: dict[WindowKey, int] = {}
    for step in range(first, last + 1):
        for shard in range(plan.num_shards):
            for index, _, _ in plan.window_span(step, shard):
                met.setdefault(WindowKey(plan.locate(step)[0], shard, index), step)
    needs = list(plan.needs(plan.first_need(first), last))
    keys = [need.key for need in needs]
    assert all(a < b for a, b in pairwise(needs))
    assert [Need.of(key) for key in keys] == needs
    # All windows that are met, in the order they are met; a shard that has ended in the epoch's last step
    # may have a window listed that is already over.
    assert [key for key in keys if key in met] == sorted(met, key=lambda key: (met[key], Need.of(key)))
    assert set(met) <= set(keys)
    assert all(key.epoch == plan.locate(first)[0] for key in set(keys) - set(met))
    # Beginning in the middle is the rest of the whole.
    if needs:
        middle = data.draw(st.integers(0, len(needs) - 1))
        assert list(plan.needs(needs[middle], last)) == needs[middle:]


def test_uneven_files() -> None:
    whole = plan(manifest((7,), (1,), (13,), (2,), (8,)), rows_per_shard=1, window_rows=3)
    assert [stop - start for start, stop in map(whole.segment, range(8))] == [4, 4, 4, 4, 4, 4, 4, 3]
    assert whole.steps_per_epoch == 4
    assert whole.step_rows(4) == (1, 1, 1, 1, 1, 1, 1, 0)


def test_many_rows() -> None:
    files = manifest(*[(997,) * 5] * 20, (300,))
    whole = plan(files, rows_per_shard=16, window_rows=512)
    assert files.num_rows == 100_000
    for epoch in range(2):
        windows = [w for shard in range(8) for w in whole.windows(epoch, shard)]
        rows = np.concatenate([w.row_ids for w in windows])
        assert np.array_equal(np.sort(rows), np.arange(100_000))


def test_work_does_not_grow_with_rows() -> None:
    """A trillion rows: anything in proportion to them would not end."""
    huge = plan(manifest((10**9,) * 1000), rows_per_shard=64, window_rows=4096)
    step = huge.steps_per_epoch * 3 // 2
    assert sum(huge.step_rows(step)) == 512
    assert len(set(rows_of(huge, step, 5))) == 64
    assert len(next(huge.needs(huge.first_need(step), step + 10**6)).key) == 3


def test_shuffle_differs_by_epoch_shard_and_seed() -> None:
    files = manifest((50,) * 4, (50,) * 4)
    one, other = plan(files), plan(files, seed=2)
    orders = [rows_of(p, step, 0) for p in (one, other) for step in (1, one.steps_per_epoch + 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffle_rows_keep_the_order_of_files() -> None:
    ordered = plan(manifest((5, 11), (16,)), num_shards=2, rows_per_shard=4, shuffle=False)
    steps = range(1, ordered.steps_per_epoch + 1)
    assert [row for step in steps for row in rows_of(ordered, step, 0)] == list(range(16))
    assert [row for step in steps for row in rows_of(ordered, step, 1)] == list(range(16, 32))


def test_golden_rows() -> None:
    """These must never change: runs resume on them."""
    golden = plan(manifest((7,), (1,), (13,), (2,), (8,)), num_shards=4, rows_per_shard=3, window_rows=5)
    assert [rows_of(golden, 1, shard) for shard in range(4)] == [
        [25, 23, 7],
        [11, 9, 8],
        [19, 17, 16],
        [4, 5, 2],
    ]
    assert [rows_of(golden, 5, shard) for shard in range(4)] == [
        [7, 3, 4],
        [23, 25, 28],
        [10, 8, 12],
        [16, 18, 19],
    ]
    assert golden.fingerprint == "65fc7ef80ccb515902d2f9eae7b833c8426d1ab16678060238f32575054ad091"


def test_too_few_rows() -> None:
    with pytest.raises(DataError, match=r"has 15 rows, but one step needs 16 \(8 logical shards of 2 rows\)"):
        plan(manifest((15,)))
    with pytest.raises(DataError, match="no rows"):
        plan(manifest((0,), ()), allow_short=True)
    # Validation: every row once, some shards empty.
    short = plan(manifest((3,)), allow_short=True)
    assert short.steps_per_epoch == 1
    assert short.step_rows(1) == (1, 1, 1, 0, 0, 0, 0, 0)
    assert short.num_windows(7) == 0


def test_steps_and_windows_out_of_range() -> None:
    whole = plan(manifest((32,)))
    with pytest.raises(ValueError, match="count from 1"):
        whole.locate(0)
    with pytest.raises(IndexError, match="shard 0 has 1 windows"):
        whole.window(0, 0, 1)


def test_json_round_trip() -> None:
    files = manifest((7,), (), (13, 2))
    assert Manifest.from_json(files.to_json()) == files
    whole = plan(files, transform="jobs.gpt:encode", transform_digest="abc", rows_per_shard=1)
    again = Plan.from_json(whole.to_json())
    assert again == whole
    assert again.fingerprint == whole.fingerprint


def test_fingerprint_changes_with_every_input() -> None:
    base = plan(manifest((64,)), transform="a:b", transform_digest="1")
    changes: list[dict[str, Any]] = [
        {"manifest": manifest((65,))},
        {"seed": 2},
        {"num_shards": 4},
        {"rows_per_shard": 1},
        {"window_rows": 6},
        {"shuffle": False},
        {"transform": "a:c"},
        {"transform": None},
        {"transform_digest": "2"},
    ]
    prints = [dataclasses.replace(base, **change).fingerprint for change in changes]
    assert len({base.fingerprint, *prints}) == len(changes) + 1


def test_manifest_digest_covers_all_but_the_place() -> None:
    base = manifest((4,), (5,))
    assert manifest((4,), (5,), root="s3://elsewhere").digest == base.digest
    one = base.files[0]
    others = [
        dataclasses.replace(base, files=(dataclasses.replace(one, **change), base.files[1]))
        for change in ({"path": "p"}, {"size": 1}, {"row_groups": (2, 2)}, {"digest": "d"})
    ]
    others.append(dataclasses.replace(base, columns=(("x", "double"), ("id", "int64"))))
    others.append(dataclasses.replace(base, files=base.files[::-1]))
    assert len({base.digest, *(other.digest for other in others)}) == 7


@settings(max_examples=50)
@given(FILES)
def test_manifest_places(files: Manifest) -> None:
    row = 0
    group = 0
    for i, entry in enumerate(files.files):
        for j, size in enumerate(entry.row_groups):
            assert files.locate_group(group) == (i, j)
            assert files.first_row(i, j) == row
            group, row = group + 1, row + size
    assert files.num_rows == row
