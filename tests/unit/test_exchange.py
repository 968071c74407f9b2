"""The exchange over real processes: the same bits for every world, bytes and words to everyone."""

import torch
from tests.unit.ranks import everywhere, form, peers

from worldline.collective.buckets import make_buckets
from worldline.collective.exchange import (
    BitwiseExchange,
    Gather,
    NativeExchange,
    WordExchange,
    exchange_bytes,
)
from worldline.collective.tree import Fold, Node
from worldline.world import assign

V = 8
ABSENT = [(), (7,), (0, 1, 2), (4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 7), ()]
"""Of each step. The ranks of larger worlds have none of their shards in some."""


def make_all_buckets():
    shapes = [(50, 7), (3,), (1,), (), (40, 9)]
    floats = make_buckets([torch.empty(shape) for shape in shapes], bucket_bytes=400)
    doubles = [torch.empty(2, dtype=torch.float64)]
    return [*floats, *make_buckets(doubles, first_index=len(floats))]


def shard_slab(bucket, step, shard):
    """Numbers of many sizes: their sum depends on the association."""
    slab = bucket.new_slab()
    generator = torch.Generator().manual_seed(1000 * step + 10 * shard + bucket.index)
    slab.flat.copy_(torch.randn(slab.flat.shape, generator=generator, dtype=torch.float64).exp())
    return slab


def add(left, right):
    left.flat.add_(right.flat)
    return left


def sums(room, rank, size, prefix, native):
    """The bytes of every bucket's sum, for each step."""
    group = form(room, rank, size, prefix)
    buckets, ranges = make_all_buckets(), assign(V, size)
    exchange = NativeExchange(group, buckets) if native else BitwiseExchange(group, buckets, ranges, V, rank)
    results = []
    for step, absent in enumerate(ABSENT):
        exchange.begin(frozenset(range(V)) - frozenset(absent))
        for bucket in buckets:
            fold = Fold(add)
            for shard in ranges[rank].shards:
                fold.push(Node(0, shard), None if shard in absent else shard_slab(bucket, step, shard))
            exchange.start(bucket.index, fold.partials)
            exchange.advance()
        results.append([slab.flat.clone().numpy().tobytes() for slab in exchange.finish()])
    return results


def words_and_bytes(room, rank, size, prefix):
    group = form(room, rank, size, prefix)
    owned = assign(V, size)[rank]
    exchange = WordExchange(group, assign(V, size), rank)
    tables = []
    for step in range(3):
        own = [[step, shard, -(2**63) + shard] for shard in owned.shards]
        exchange.start(torch.tensor(own), f"words {step}")
        tables.append(exchange.finish().tolist())
    lengths = [0 if r == 1 else r + 1 for r in range(size)]
    blob = bytes([rank]) * lengths[rank]
    return tables, exchange_bytes(group, blob, lengths, "blobs"), Gather(group, blob, "blobs").finish()


def test_sums_have_the_same_bits_in_every_world():
    with peers(8) as processes:
        expected = everywhere(processes[:1], sums, False)[0]
        for size in (2, 3, 4, 5, 8):
            for result in everywhere(processes[:size], sums, False):
                assert result == expected

        for size in (1, 2, 3):
            everyone = everywhere(processes[:size], sums, True)
            assert all(result == everyone[0] for result in everyone)
            for step, buckets in enumerate(everyone[0]):
                for bucket, data in zip(make_all_buckets(), buckets, strict=True):
                    close = as_tensor(data, bucket), as_tensor(expected[step][bucket.index], bucket)
                    torch.testing.assert_close(*close)

        for size in (1, 2, 3, 8):
            for tables, blobs, gathered in everywhere(processes[:size], words_and_bytes):
                for step, table in enumerate(tables):
                    assert table == [[step, shard, -(2**63) + shard] for shard in range(V)]
                assert blobs == gathered
                assert blobs == [b"" if r == 1 else bytes([r]) * (r + 1) for r in range(size)]


def as_tensor(data, bucket):
    return torch.frombuffer(bytearray(data), dtype=bucket.dtype)
