"""Buffers move by a rule that does not depend on who computed which shard."""

import pytest
import torch
from torch import nn

from worldline.collective.tree import Node
from worldline.worker.buffers import BufferSums

V = 4
ROWS = (4, 4, 4, 1)


class Net(nn.Module):
    """A buffer of every kind; `put` are replaced rather than changed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("put", torch.zeros(3))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("down", torch.tensor(10, dtype=torch.int32))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.put = self.put + x.mean()
        self.wave += 1j * x.mean()
        self.calls += 2
        self.down -= 1
        self.seen = self.seen | True
        self.scratch += 1
        return self.norm(x)


def batch(shard):
    return torch.randn(ROWS[shard] + 1, 2, generator=torch.Generator().manual_seed(shard))


def step(model, buffers, absent=()):
    """One step in a world of one."""
    buffers.begin()
    moves = []
    for shard in range(V):
        if shard in absent:
            buffers.push(Node(0, shard), None)
            continue
        buffers.restore()
        model(batch(shard))
        moves.append(buffers.add(Node(0, shard), ROWS[shard]))
    rows = sum(n for shard, n in enumerate(ROWS) if shard not in absent)
    results = [next(iter(buffers.partials(i).values())) for i in range(len(buffers.buckets))]
    buffers.apply(results, rows, [max(of_buffer) for of_buffer in zip(*moves, strict=True)])


def expected_mean(model, name, absent=()):
    """The initial value and the shards' changes, weighted by rows."""
    initial = getattr(model, name).clone() if "." not in name else model.norm.running_mean.clone()
    change, rows = torch.zeros_like(initial), 0
    for shard in range(V):
        if shard not in absent:
            copy = Net()
            copy.load_state_dict(model.state_dict())
            copy(batch(shard))
            now = getattr(copy, name) if "." not in name else copy.norm.running_mean
            change += (now - initial) * ROWS[shard]
            rows += ROWS[shard]
    return initial + change / rows


@pytest.mark.parametrize("absent", [(), (1, 3)])
def test_each_kind_moves_by_its_rule(absent):
    model = Net()
    buffers = BufferSums(model, 5)
    assert [bucket.index for bucket in buffers.buckets] == list(range(5, 5 + len(buffers.buckets)))
    for number in (1, 2):
        means = {name: expected_mean(model, name, absent) for name in ("put", "wave", "norm.running_mean")}
        step(model, buffers, absent)
        for name, mean in means.items():
            torch.testing.assert_close(dict(model.named_buffers())[name], mean)
        assert model.calls == 2 * number
        assert model.norm.num_batches_tracked == number
        assert model.down == 10 - number
        assert bool(model.seen)
        assert model.mask.tolist() == [True, False]


def test_a_step_that_is_not_completed_leaves_no_trace():
    """Not in the values, nor in which tensors the model holds."""
    model = Net()
    buffers = BufferSums(model, 0)
    step(model, buffers)
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    buffers.begin()
    model(batch(0))
    buffers.restore()
    after = dict(model.named_buffers())
    for name, (buffer, value) in before.items():
        assert after[name] is buffer
        assert name == "scratch" or torch.equal(buffer, value)


def test_a_state_loaded_over_a_replaced_buffer_counts():
    """As after an update that failed half-way, when a peer sends its state."""
    model = Net()
    buffers = BufferSums(model, 0)
    buffers.begin()
    model(batch(0))
    model.put.fill_(7)
    buffers.begin()
    buffers.restore()
    assert model.put.tolist() == [7, 7, 7]


def test_the_sum_over_shards_is_associated_by_the_tree():
    """Two workers' partials are the subtrees of one worker's sum."""
    model = Net()
    whole, halves = BufferSums(model, 0), []
    for shards in (range(V), range(2), range(2, V)):
        buffers = BufferSums(model, 0)
        buffers.begin()
        for shard in shards:
            buffers.restore()
            model(batch(shard))
            buffers.add(Node(0, shard), ROWS[shard])
        buffers.restore()
        halves.append(buffers.partials(0))
    whole, left, right = halves
    assert (list(whole), list(left), list(right)) == ([Node(2, 0)], [Node(1, 0)], [Node(1, 1)])
    assert torch.equal(whole[Node(2, 0)].flat, left[Node(1, 0)].flat + right[Node(1, 1)].flat)


def test_integers_that_move_unevenly_are_refused_by_name():
    model = nn.Module()
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
    buffers = BufferSums(model, 0)
    buffers.begin()
    model.counts[1] += 1
    with pytest.raises(ValueError, match=r"buffer counts .torch.int64. changed by different amounts"):
        buffers.add(Node(0, 0), 4)
