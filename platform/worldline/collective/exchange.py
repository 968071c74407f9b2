"""The reduction: every replica gets the canonical sum of every bucket, and the words of every shard.

No operation does arithmetic on the wire. Each rank owns one chunk of a bucket; the others send it their
partial sums of it (all-to-all, lane 0), it adds them in tree order, and sends the result to all (all-to-all
again rather than gloo's ring all-gather, because every rank then touches every peer and a death is seen by
all at once; lane 1). The bytes on the wire equal those of a ring all-reduce where each rank has one partial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldline.collective.buckets import Bucket, Slab
from worldline.collective.group import Group, Pending
from worldline.collective.tree import Node, present, subtrees, total
from worldline.world import ShardRange


class BitwiseExchange:
    """Sums buckets over the canonical tree within one generation.

    Protocol of one step: `begin(present shards)`; `start(index, partials)` for each bucket in bucket order,
    as soon as the partials are whole; `advance()` at any time moves what has arrived on; `finish()` returns
    the sums of all buckets, which stay valid until the next `begin`.
    """

    def __init__(
        self,
        group: Group | None,
        buckets: Sequence[Bucket],
        ranges: Sequence[ShardRange],
        num_shards: int,
        rank: int,
    ) -> None:
        self._group = group
        self._wires = [_Wire(bucket, ranges, rank) for bucket in buckets] if group is not None else []
        self._ranges = ranges
        self._num_shards = num_shards
        self._rank = rank
        self._shards: frozenset[int] = frozenset()
        self._nodes: list[tuple[Node, ...]] = []
        self._results: list[Slab] = []
        self._arriving: list[tuple[int, torch.Tensor, Pending]] = []
        self._returning: list[Pending] = []

    def begin(self, shards: frozenset[int]) -> None:
        if shards != self._shards:
            self._shards = shards
            self._nodes = [present(subtrees(r), shards) for r in self._ranges]
        self._results = [wire.result for wire in self._wires]
        self._arriving = []
        self._returning = []

    def start(self, index: int, partials: dict[Node, Slab]) -> None:
        if self._group is None:
            (root,) = partials.values()
            self._results.append(root)
            return
        wire = self._wires[index]
        mine = [partials[node].flat for node in self._nodes[self._rank]]
        if len(mine) == 1:
            outgoing = mine[0]
        else:
            outgoing = wire.outgoing[: len(mine) * wire.result.flat.numel()]
            if mine:
                pieces = [torch.split(flat, wire.cuts) for flat in mine]
                torch.cat([p[r] for r in range(len(wire.cuts)) for p in pieces], out=outgoing)
        length = wire.cuts[self._rank]
        arriving = [len(nodes) * length for nodes in self._nodes]
        incoming = wire.incoming[: sum(arriving)]
        pending = self._group.all_to_all(
            incoming, outgoing, arriving, [len(mine) * c for c in wire.cuts], lane=0, label=f"bucket {index}"
        )
        self._arriving.append((index, incoming, pending))

    def advance(self) -> None:
        while self._arriving and self._arriving[0][2].done():
            self._return_first()

    def finish(self) -> list[Slab]:
        while self._arriving:
            self._return_first()
        for pending in self._returning:
            assert self._group is not None
            self._group.wait(pending)
        return self._results

    def _return_first(self) -> None:
        """Add the partials of the oldest bucket's own chunk and send the sum to everyone."""
        assert self._group is not None
        index, incoming, pending = self._arriving.pop(0)
        self._group.wait(pending)
        wire = self._wires[index]
        size, length = self._group.size, wire.cuts[self._rank]
        nodes = [node for of_rank in self._nodes for node in of_rank]
        chunks = dict(zip(nodes, incoming.view(len(nodes), length), strict=True))
        chunk = total(chunks, self._num_shards, torch.Tensor.add_)
        # What went out before from this memory has arrived: the wait above was for both ways.
        outgoing = wire.outgoing[: size * length]
        outgoing.view(size, length).copy_(chunk)
        self._returning.append(
            self._group.all_to_all(
                wire.result.flat, outgoing, wire.cuts, [length] * size, lane=1, label=f"result {index}"
            )
        )


class _Wire:
    """Memory for one bucket on its way, the same in every step of a generation.

    Memory that is given back and taken anew costs a page fault a page: on a CPU twice what the sums cost.

    cuts: how many elements each rank adds up. result: the sums.
    """

    def __init__(self, bucket: Bucket, ranges: Sequence[ShardRange], rank: int) -> None:
        self.result = bucket.new_slab()
        flat = self.result.flat
        self.cuts = _cuts(flat.numel(), len(ranges))
        num_partials = [len(subtrees(owned)) for owned in ranges]
        length = self.cuts[rank]
        self.incoming = flat.new_empty(sum(num_partials) * length)
        self.outgoing = flat.new_empty(max(num_partials[rank] * flat.numel(), len(ranges) * length))


class NativeExchange:
    """Sums buckets by the backend's own all-reduce: the same samples, but bits that depend on the world.

    The protocol is `BitwiseExchange`'s.
    """

    def __init__(self, group: Group | None, buckets: Sequence[Bucket]) -> None:
        self._group = group
        self._buckets = buckets
        self._results: list[Slab] = []
        self._pending: list[Pending] = []

    def begin(self, shards: frozenset[int]) -> None:
        self._results = []
        self._pending = []

    def start(self, index: int, partials: dict[Node, Slab]) -> None:
        slab, *others = list(partials.values()) or (self._buckets[index].new_slab(),)
        for other in others:
            slab.flat.add_(other.flat)
        self._results.append(slab)
        if self._group is not None:
            self._pending.append(self._group.all_reduce(slab.flat, lane=0, label=f"bucket {index}"))

    def advance(self) -> None:
        return

    def finish(self) -> list[Slab]:
        for pending in self._pending:
            assert self._group is not None
            self._group.wait(pending)
        return self._results


class WordExchange:
    """Gives every rank the words (64-bit integers) of every shard, in shard order.

    `start(words)` with a [shards of this rank, width] tensor, then `finish()` -> [num_shards, width].
    """

    def __init__(self, group: Group | None, ranges: Sequence[ShardRange], rank: int) -> None:
        self._group = group
        self._counts = [r.stop - r.start for r in ranges]
        self._rank = rank
        self._words = torch.empty(0, dtype=torch.int64)
        self._pending: Pending | None = None

    def start(self, words: torch.Tensor, label: str) -> None:
        if self._group is None:
            self._words = words
            return
        width = words.shape[1]
        words = words.to(self._group.device)
        self._words = torch.empty(sum(self._counts) * width, dtype=torch.int64, device=words.device)
        self._pending = self._group.all_to_all(
            self._words,
            words.reshape(-1).repeat(self._group.size),
            [c * width for c in self._counts],
            [words.numel()] * self._group.size,
            lane=0,
            label=label,
        )
        self._words = self._words.view(-1, width)

    def finish(self) -> torch.Tensor:
        if self._group is not None and self._pending is not None:
            self._group.wait(self._pending)
        return self._words.cpu()


INLINE_BYTES = 4096
"""What a message of `Gather` may have to need one round only, its length included."""


class Gather:
    """Gives every rank the bytes of every rank, of whatever length; short ones in one round.

    Begins when it is made; `finish()` waits for it; `done()` says whether the first round needs no wait.
    """

    def __init__(self, group: Group | None, mine: bytes, label: str) -> None:
        self._group = group
        self._mine = mine
        self._label = label
        head = len(mine).to_bytes(8, "little") + mine[: INLINE_BYTES - 8]
        if group is not None:
            lengths = [INLINE_BYTES] * group.size
            self._heads = _start_bytes(group, head.ljust(INLINE_BYTES, b"\0"), lengths, label)

    def done(self) -> bool:
        return self._group is None or self._heads[1].done()

    def finish(self) -> list[bytes]:
        if self._group is None:
            return [self._mine]
        heads = _finish_bytes(self._group, *self._heads)
        lengths = [int.from_bytes(head[:8], "little") for head in heads]
        if max(lengths) <= INLINE_BYTES - 8:
            return [head[8 : 8 + length] for head, length in zip(heads, lengths, strict=True)]
        return exchange_bytes(self._group, self._mine, lengths, self._label)


def exchange_bytes(group: Group | None, mine: bytes, lengths: Sequence[int], label: str) -> list[bytes]:
    """Give every rank the bytes of every rank; lengths: how many each rank has, known to all."""
    return [mine] if group is None else _finish_bytes(group, *_start_bytes(group, mine, lengths, label))


def _start_bytes(
    group: Group, mine: bytes, lengths: Sequence[int], label: str
) -> tuple[list[torch.Tensor], Pending]:
    data = torch.frombuffer(bytearray(mine) or bytearray(1), dtype=torch.uint8)[: len(mine)]
    outgoing = data.to(group.device).repeat(group.size)
    incoming = torch.empty(sum(lengths), dtype=torch.uint8, device=group.device)
    pending = group.all_to_all(incoming, outgoing, lengths, [len(mine)] * group.size, lane=0, label=label)
    return list(torch.split(incoming, list(lengths))), pending


def _finish_bytes(group: Group, incoming: Sequence[torch.Tensor], pending: Pending) -> list[bytes]:
    group.wait(pending)
    return [bytes(part.cpu().numpy()) for part in incoming]


def _cuts(length: int, parts: int) -> list[int]:
    size, larger = divmod(length, parts)
    return [size + (rank < larger) for rank in range(parts)]
