"""Where each gradient lies: parameters packed into flat buckets, in an order that depends on the model alone.

Buckets run from the last parameter to the first, as backward tends to produce gradients, so that the first
bucket can travel while the rest is computed. Behind the gradients of a bucket stands one *presence* number a
parameter: how many shards had a gradient for it. It is added through the same tree; zero says that the
parameter took no part in the step and keeps `grad = None`, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

BUCKET_BYTES = 2 << 20
"""Part of the numeric fingerprint: the gradient norm is grouped by bucket."""


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that travel together. numel counts the gradients, length adds the presences."""

    index: int
    parameters: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int

    @property
    def length(self) -> int:
        return self.numel + len(self.parameters)

    def new_slab(self) -> Slab:
        return Slab(self)


class Slab:
    """Memory for one bucket: the flat tensor and the views of it that have the parameters' shapes."""

    __slots__ = ("flat", "gradients", "presence", "views")

    def __init__(self, bucket: Bucket) -> None:
        self.flat = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device)
        self.gradients = self.flat[: bucket.numel]
        self.presence = self.flat[bucket.numel :]
        sizes = [p.numel() for p in bucket.parameters]
        pieces = torch.split(self.gradients, sizes)
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, bucket.parameters, strict=True)]


def make_buckets(
    tensors: Iterable[torch.Tensor], *, first_index: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Pack tensors in the order given.

    A bucket closes before a tensor that would take it beyond `bucket_bytes`, so that only a tensor larger
    than that makes a larger one, and before another dtype or device.
    """
    groups: list[list[torch.Tensor]] = []
    filled = 0
    for tensor in tensors:
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        too_full = filled + size > bucket_bytes
        if not groups or too_full or kind != (groups[-1][0].dtype, groups[-1][0].device):
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return tuple(
        Bucket(first_index + i, tuple(group), group[0].dtype, group[0].device, sum(p.numel() for p in group))
        for i, group in enumerate(groups)
    )


def gradient_buckets(model: torch.nn.Module) -> tuple[Bucket, ...]:
    """Buckets of the trainable parameters, last first; tied parameters once."""
    return make_buckets(reversed([p for p in model.parameters() if p.requires_grad]))


class SlabPool:
    """Slabs for each bucket, used again: a step allocates nothing once it has run."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._free: list[list[Slab]] = [[] for _ in buckets]

    def take(self, bucket: int) -> Slab:
        free = self._free[bucket]
        return free.pop() if free else self._buckets[bucket].new_slab()

    def give(self, bucket: int, slab: Slab) -> None:
        self._free[bucket].append(slab)
