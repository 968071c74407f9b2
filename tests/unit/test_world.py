"""Who computes which shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.world import ShardRange, assign, assign_near

sizes = st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(2**k), st.integers(1, 2**k)))


def tiles(ranges: tuple[ShardRange, ...], num_shards: int) -> bool:
    return [shard for r in ranges for shard in r.shards] == list(range(num_shards))


@given(sizes)
def test_every_shard_has_one_owner_and_sizes_differ_by_at_most_one(world):
    num_shards, num_replicas = world
    ranges = assign(num_shards, num_replicas)
    assert tiles(ranges, num_shards)
    assert max(r.stop - r.start for r in ranges) - min(r.stop - r.start for r in ranges) <= 1


@pytest.mark.parametrize("num_replicas", [0, 9])
def test_more_replicas_than_shards_are_refused(num_replicas):
    with pytest.raises(ValueError, match="cannot be divided"):
        assign(8, num_replicas)


@given(sizes, st.data())
def test_a_near_assignment_is_as_even_and_keeps_at_least_as_many_shards(world, data):
    num_shards, num_replicas = world
    old = assign(num_shards, data.draw(st.integers(1, num_shards)))
    survivors = data.draw(
        st.lists(st.sampled_from([*old, None]), min_size=num_replicas, max_size=num_replicas)
    )
    near, plain = assign_near(num_shards, survivors), assign(num_shards, num_replicas)
    assert tiles(near, num_shards)
    assert sorted(r.stop - r.start for r in near) == sorted(r.stop - r.start for r in plain)
    assert kept(near, survivors) >= kept(plain, survivors)


def kept(ranges: tuple[ShardRange, ...], old: list[ShardRange | None]) -> int:
    return sum(len(set(r.shards) & set(o.shards)) for r, o in zip(ranges, old, strict=True) if o is not None)


def test_after_one_of_four_is_lost_the_others_keep_what_they_have():
    first, _, third, fourth = assign(8, 4)
    assert assign_near(8, [first, third, fourth]) == (ShardRange(0, 3), ShardRange(3, 6), ShardRange(6, 8))
    assert assign_near(8, [*assign(8, 4)[:2], fourth]) == (
        ShardRange(0, 2),
        ShardRange(2, 5),
        ShardRange(5, 8),
    )
