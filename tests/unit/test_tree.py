"""One association of every sum, whoever owns what and whichever shards are absent."""

import operator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.collective.tree import Fold, Node, present, subtrees, total
from worldline.world import ShardRange

SIZES = (1, 2, 4, 8, 16, 32, 64)


@st.composite
def worlds(draw):
    """(values of the present shards, V, two partitions of 0..V-1 into contiguous ranges)."""
    num_shards = draw(st.sampled_from(SIZES))
    shards = draw(st.sets(st.integers(0, num_shards - 1), min_size=1))
    numbers = st.floats(-1e30, 1e30, allow_subnormal=True)
    values = {shard: draw(numbers) for shard in sorted(shards)}
    return values, num_shards, draw(partitions(num_shards)), draw(partitions(num_shards))


def partitions(num_shards):
    cuts = st.sets(st.integers(0, num_shards))
    return cuts.map(lambda c: [ShardRange(a, b) for a, b in pairwise(sorted({0, num_shards} | c))])


def folded(values, shards):
    fold = Fold(operator.add)
    for shard in shards:
        fold.push(Node(0, shard), values.get(shard))
    return fold.partials


@given(st.integers(0, 200), st.integers(0, 200))
def test_subtrees_tile_the_range_and_are_maximal(a, b):
    owned = ShardRange(min(a, b), max(a, b))
    nodes = subtrees(owned)
    assert [shard for node in nodes for shard in leaves(node)] == list(owned.shards)
    for node in nodes:
        assert not set(leaves(node.parent)) <= set(owned.shards)


@given(st.sampled_from(SIZES), st.data())
def test_a_range_is_a_few_subtrees(num_shards, data):
    ranges = data.draw(partitions(num_shards))
    levels = num_shards.bit_length() - 1
    assert all(len(subtrees(owned)) <= max(1, 2 * levels) for owned in ranges)


@given(worlds())
def test_any_partition_adds_to_the_same_bits(world):
    values, num_shards, *both = world
    sums = []
    for ranges in both:
        partials = {}
        for owned in ranges:
            partials |= folded(values, owned.shards)
        sums.append(total(partials, num_shards, operator.add).hex())
    assert len(set(sums)) == 1


@given(worlds())
def test_what_a_fold_leaves_is_what_the_others_expect(world):
    """Peers know from the ranges alone which partials come from whom."""
    values, _, ranges, _ = world
    for owned in ranges:
        assert set(folded(values, owned.shards)) == set(present(subtrees(owned), values))


@given(worlds())
def test_adding_in_place_to_the_left_sibling_changes_nothing(world):
    values, _, ranges, _ = world
    for owned in ranges:
        fold = Fold(operator.add)
        for shard in owned.shards:
            value = values.get(shard)
            left = None if value is None else fold.pop_left_sibling(Node(0, shard))
            if left is None:
                fold.push(Node(0, shard), value)
            else:
                fold.push(Node(0, shard).parent, left + value)
        assert fold.partials == folded(values, owned.shards)


@given(worlds())
def test_an_absent_shard_is_not_a_zero(world):
    """-0.0 stays -0.0 beside absent shards."""
    values, num_shards, ranges, _ = world
    partials = {}
    for owned in ranges:
        partials |= folded(dict.fromkeys(values, -0.0), owned.shards)
    assert total(partials, num_shards, operator.add).hex() == "-0x0.0p+0"


def test_the_association_is_that_of_the_tree():
    terms = {shard: str(shard) for shard in range(8) if shard != 5}
    fold = Fold(lambda a, b: f"({a}{b})")
    for shard in range(8):
        fold.push(Node(0, shard), terms.get(shard))
    assert fold.partials == {Node(3, 0): "(((01)(23))(4(67)))"}
    assert total({Node(0, 1): "1", Node(1, 3): "c", Node(0, 2): "2"}, 8, "({}{})".format) == "((12)c)"


def test_every_value_added_into_another_is_released_once():
    released = []
    fold = Fold(lambda a, b: a, released.append)
    for shard in range(1, 8):
        fold.push(Node(0, shard), f"v{shard}")
    assert sorted(released + list(fold.partials.values())) == [f"v{shard}" for shard in range(1, 8)]


def test_present_keeps_the_subtrees_with_a_shard_under_them():
    nodes = subtrees(ShardRange(1, 8))
    assert nodes == (Node(0, 1), Node(1, 1), Node(2, 1))
    assert present(nodes, {1, 7}) == (Node(0, 1), Node(2, 1))
    assert present(nodes, set()) == ()


def test_nothing_to_add_is_an_error():
    with pytest.raises(ValueError, match="no shard has a value"):
        total({}, 8, operator.add)


def leaves(node):
    return range(node.place << node.level, (node.place + 1) << node.level)
