"""Gradients of one replica: folded shard by shard, handed over bucket by bucket while backward runs."""

import operator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from worldline.collective.buckets import make_buckets
from worldline.collective.sums import GradientSums
from worldline.collective.tree import Node, present, subtrees, total
from worldline.world import ShardRange


class Net(nn.Module):
    """Layer 0 gets its gradient last; `sometimes` takes part where asked, `never` does not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.sometimes = nn.Parameter(torch.randn(5))
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, x, use):
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.sometimes if use else x).square().sum()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def buckets_of(model, bucket_bytes=120):
    return make_buckets(reversed(list(model.parameters())), bucket_bytes=bucket_bytes)


def loss(model, shard, micro=0):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * shard + micro))
    return model(x, use=shard in (1, 2, 6))


def gradients(model, buckets, shard, micros=1):
    """The flat gradients and presences of one shard, by plain autograd, bucket by bucket."""
    model.zero_grad()
    for micro in range(micros):
        loss(model, shard, micro).backward()
    slabs = [bucket.new_slab() for bucket in buckets]
    for bucket, slab in zip(buckets, slabs, strict=True):
        for i, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None:
                slab.views[i].copy_(parameter.grad)
                slab.presence[i] = 1
    model.zero_grad()
    return [slab.flat for slab in slabs]


def run(model, sums, owned, absent=(), micros=1):
    """The order in which one step hands buckets over, and the partials of each: node -> flat tensor."""
    came, partials = [], {}

    def on_bucket(index, slabs):
        came.append(index)
        partials[index] = {node: slab.flat.clone() for node, slab in slabs.items()}

    sums.begin()
    with_rows = [shard for shard in owned.shards if shard not in absent]
    for shard in owned.shards if with_rows else ():
        if shard in absent:
            if shard < with_rows[-1]:
                sums.push(Node(0, shard), None)
            continue
        for micro in range(micros):
            value = loss(model, shard, micro)
            if shard == with_rows[-1] and micro == micros - 1:
                sums.arm(
                    Node(0, shard), [(Node(0, v), None) for v in range(shard + 1, owned.stop)], on_bucket
                )
            value.backward()
        if shard == with_rows[-1]:
            sums.finish()
        else:
            sums.add(Node(0, shard))
    if not with_rows:
        for shard in owned.shards:
            sums.push(Node(0, shard), None)
        sums.hand_over(on_bucket)
    return came, partials


@pytest.mark.parametrize("owned", [(0, 8), (0, 3), (3, 8), (5, 6), (1, 7)])
@pytest.mark.parametrize("absent", [(), (7,), (0, 1), (3, 4, 6), tuple(range(8))])
def test_partials_are_the_tree_sums_of_the_shards_gradients(model, owned, absent):
    buckets, owned = buckets_of(model), ShardRange(*owned)
    sums = GradientSums(buckets)
    for _ in range(2):  # slabs of the first step are used again
        came, partials = run(model, sums, owned, absent, micros=2)
        assert came == list(range(len(buckets)))
        shards = [shard for shard in owned.shards if shard not in absent]
        for node in present(subtrees(owned), shards):
            leaves = {shard: gradients(model, buckets, shard, 2) for shard in shards if below(node, shard)}
            for bucket in buckets:
                values = {Node(0, shard): flats[bucket.index] for shard, flats in leaves.items()}
                expected = total({**values}, 8, operator.add)
                assert torch.equal(partials[bucket.index].pop(node), expected)
        assert not any(partials.values())


def below(node, shard):
    return shard >> node.level == node.place


def test_buckets_leave_in_order_while_backward_still_runs(model):
    came = []
    model.layers[0].bias.register_post_accumulate_grad_hook(lambda _: came.append("the first layer"))
    sums = GradientSums(buckets_of(model))
    sums.begin()
    value = loss(model, 1)
    sums.arm(Node(0, 1), (), lambda index, _: came.append(index))
    value.backward()
    assert came == [0, 1, "the first layer", 2]
    sums.finish()
    assert came == [0, 1, "the first layer", 2, 3, 4]


def test_a_bucket_without_its_gradients_holds_up_the_others_until_the_end(model):
    parameters = [p for p in model.parameters() if p is not model.never]
    buckets = make_buckets([model.never, *reversed(parameters)], bucket_bytes=12)
    came = []
    sums = GradientSums(buckets)
    sums.begin()
    value = loss(model, 1)
    sums.arm(Node(0, 1), (), lambda index, _: came.append(index))
    value.backward()
    assert came == []
    sums.finish()
    assert came == list(range(len(buckets)))


def test_presence_counts_the_shards_that_had_a_gradient(model):
    buckets = buckets_of(model, bucket_bytes=10**6)
    _, partials = run(model, GradientSums(buckets), ShardRange(0, 8), absent=(4,))
    (flat,) = partials[0].values()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    counts = flat[buckets[0].numel :].tolist()
    by_name = {names[id(p)]: count for p, count in zip(buckets[0].parameters, counts, strict=True)}
    assert by_name["sometimes"] == 3
    assert by_name["never"] == 0
    assert {count for name, count in by_name.items() if name.startswith("layers")} == {7}


def test_a_step_that_failed_half_way_leaves_no_trace(model):
    buckets, owned = buckets_of(model), ShardRange(0, 8)
    sums = GradientSums(buckets)
    _, expected = run(model, sums, owned)

    def fail(index, partials):
        raise RuntimeError("the group broke")

    sums.begin()
    sums.add(Node(0, 0))
    loss(model, 1).backward()
    value = loss(model, 2)
    sums.arm(Node(0, 2), (), fail)
    with pytest.raises(RuntimeError, match="the group broke"):
        value.backward()
    for renew in (False, True):
        if renew:
            sums.renew()
        _, again = run(model, sums, owned)
        for index, partials in expected.items():
            assert all(torch.equal(again[index][node], flat) for node, flat in partials.items())


def test_memory_is_used_again_until_it_is_renewed(model):
    sums = GradientSums(buckets_of(model))
    where = []

    def note(index, partials):
        where.append({slab.flat.data_ptr() for slab in partials.values()})

    for renew in (False, False, True):
        if renew:
            held = sums._folds[0].partials  # as an abandoned operation holds its tensors
            sums.renew()
        sums.begin()
        for shard in (1, 2):
            loss(model, shard).backward()
            sums.add(Node(0, shard))
        sums.hand_over(note)
    assert held
    n = len(where) // 3
    assert where[:n] == where[n : 2 * n]
    assert not where[n] & where[2 * n]


def test_sparse_gradients_are_refused_by_name_of_the_option():
    embedding = nn.Embedding(4, 2, sparse=True)
    sums = GradientSums(make_buckets(embedding.parameters()))
    sums.begin()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        sums.add(Node(0, 0))


def test_reentrant_checkpointing_is_refused_where_a_gradient_comes_twice():
    layer = nn.Linear(2, 2)
    sums = GradientSums(make_buckets(layer.parameters()))
    x = torch.randn(3, 2, requires_grad=True)
    sums.begin()
    value = sum(checkpoint(layer, x, use_reentrant=True).sum() for _ in range(2))
    sums.arm(Node(0, 0), (), lambda index, partials: None)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        value.backward()
