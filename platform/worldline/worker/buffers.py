"""Buffers that training changes (BatchNorm's statistics), by a rule that does not depend on the world.

Every shard starts from the step's initial value, so what it adds does not depend on which shards ran before
it on the same worker. Floating-point buffers then move by the mean of the shards' changes, weighted by rows
and added over the canonical tree; integer buffers (BatchNorm counts its calls) move by the largest change of
any shard. Only persistent buffers take part: the others are no state and are taken for constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldline.collective.buckets import Bucket, Slab, make_buckets
from worldline.collective.tree import Fold, Node


class BufferSums:
    """The buffers of one model over one step.

    Protocol: `begin()`; for each shard `restore()`, run it, `add(leaf, rows)`; `partials(i)` go through the
    exchange as further buckets; `apply(results, rows, moves)` or, where the step is not completed,
    `restore()`.
    """

    def __init__(self, model: torch.nn.Module, first_bucket: int) -> None:
        names = set(model.state_dict(keep_vars=True))
        buffers = [b for name, b in model.named_buffers() if name in names]
        self._floats = [b for b in buffers if b.is_floating_point()]
        self._integers = [b for b in buffers if not b.is_floating_point() and b.dtype != torch.bool]
        self._initial_floats = [b.clone() for b in self._floats]
        self._initial_integers = [b.clone() for b in self._integers]
        self.buckets: tuple[Bucket, ...] = make_buckets(self._floats, first_index=first_bucket)
        self._folds: list[Fold[Slab]] = []

    @property
    def num_integers(self) -> int:
        return len(self._integers)

    @torch.no_grad()
    def begin(self) -> None:
        if self._floats:
            torch._foreach_copy_(self._initial_floats, self._floats)
        if self._integers:
            torch._foreach_copy_(self._initial_integers, self._integers)
        self._folds = [Fold(_add) for _ in self.buckets]

    @torch.no_grad()
    def restore(self) -> None:
        if self._floats:
            torch._foreach_copy_(self._floats, self._initial_floats)
        if self._integers:
            torch._foreach_copy_(self._integers, self._initial_integers)

    @torch.no_grad()
    def add(self, leaf: int, rows: int) -> list[int]:
        """Take the shard's changes; returns the integer buffers' moves (a scalar each, the largest
        element's).
        """
        if rows == 0:
            for fold in self._folds:
                fold.push(leaf, None)
            return [0] * len(self._integers)
        start = 0
        for bucket, fold in zip(self.buckets, self._folds, strict=True):
            slab = bucket.new_slab()
            stop = start + len(bucket.parameters)
            torch._foreach_copy_(slab.views, self._floats[start:stop])
            torch._foreach_sub_(slab.views, self._initial_floats[start:stop])
            slab.flat.mul_(rows)
            fold.push(leaf, slab)
            start = stop
        return [
            int((now - before).max()) if now.numel() else 0
            for now, before in zip(self._integers, self._initial_integers, strict=True)
        ]

    def partials(self, index: int) -> dict[Node, Slab]:
        return self._folds[index].partials

    @torch.no_grad()
    def apply(self, results: Sequence[Slab], rows: int, moves: Sequence[int]) -> None:
        start = 0
        for bucket, slab in zip(self.buckets, results, strict=True):
            slab.flat.div_(rows)
            stop = start + len(bucket.parameters)
            torch._foreach_copy_(self._floats[start:stop], self._initial_floats[start:stop])
            torch._foreach_add_(self._floats[start:stop], slab.views)
            start = stop
        for buffer, before, move in zip(self._integers, self._initial_integers, moves, strict=True):
            buffer.copy_(before + move)


def _add(left: Slab, right: Slab) -> Slab:
    left.flat.add_(right.flat)
    return left
