"""The NCCL group and the exchange over it, on one GPU: a world of one, since NCCL takes one rank a device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from worldline.collective.buckets import make_buckets
from worldline.collective.exchange import BitwiseExchange, Gather, WordExchange
from worldline.collective.nccl import form_nccl
from worldline.collective.tree import Node
from worldline.world import assign


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for generation in (1, 2):
        group = form_nccl(
            store,
            prefix=f"generation-{generation}",
            rank=0,
            size=1,
            address="127.0.0.1",
            form_timeout_s=60,
            timeout_s=60,
            cancelled=lambda: False,
        )
        tensors = [torch.randn(1000, 300, device="cuda"), torch.randn(7, device="cuda")]
        buckets = make_buckets(tensors)
        exchange = BitwiseExchange(group, buckets, assign(2, 1), 2, 0)
        exchange.begin(frozenset({0, 1}))
        slabs = [bucket.new_slab() for bucket in buckets]
        for bucket, slab in zip(buckets, slabs, strict=True):
            torch._foreach_copy_(slab.views, list(bucket.parameters))
            exchange.start(bucket.index, {Node(1, 0): slab})
        results = exchange.finish()
        assert all(torch.equal(a.flat, b.flat) for a, b in zip(results, slabs, strict=True))
        words = WordExchange(group, assign(2, 1), 0)
        words.start(torch.tensor([[1, 2], [3, 4]]), "words")
        assert words.finish().tolist() == [[1, 2], [3, 4]]
        assert Gather(group, b"state", "bytes").finish() == [b"state"]
        group.abandon()
    print("NCCL: two generations formed, exchanged and abandoned")


if __name__ == "__main__":
    main()
