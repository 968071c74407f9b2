"""A replica's gradients of one step, folded shard by shard into the partial sums of its canonical
subtrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from worldline.collective.buckets import Bucket, Slab, SlabPool
from worldline.collective.tree import Fold, Node

OnBucket = Callable[[int, dict[Node, Slab]], None]
Pushed = tuple[Node, Sequence[Slab] | None]


class GradientSums:
    """Collects what backward leaves in `parameter.grad`.

    Protocol of one step: `begin()`; then, for each leaf in ascending order, run its backward passes
    (gradients of several micro-batches add up in `parameter.grad`) and call `add(leaf)`, or `push(node,
    slabs)` for what need not be run: slabs, one a bucket, where the sums are known, None where there are no
    rows. For the last leaf that is run call `arm(leaf, behind, on_bucket)` before its last backward, `behind`
    being what is to be pushed after it, and `finish()` after it instead of `add`: `on_bucket(index,
    partials)` is then called once a bucket, always in bucket order, as soon as backward has completed the
    bucket, while the rest is still being computed. Where no leaf is run, `hand_over(on_bucket)`. The partials
    stay valid until `begin()`. `take()` takes them out, to be pushed in a later try at the same step.

    A leaf is a logical shard; where the tree does not matter, the caller may run all shards as one leaf.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._pool = SlabPool(buckets)
        self._folds: list[Fold[Slab]] = []
        self._leaf = Node(0, 0)
        self._behind: Sequence[Pushed] = ()
        self._on_bucket: OnBucket | None = None
        self._waiting: list[int] = []
        self._next = 0
        self._hooks = [
            _after_gradient(parameter, self._make_hook(bucket.index))
            for bucket in buckets
            for parameter in bucket.parameters
        ]

    def renew(self) -> None:
        """Take new memory: an abandoned operation may still write to the old."""
        self._pool = SlabPool(self._buckets)
        self._folds = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        for index, fold in enumerate(self._folds):
            for slab in fold.partials.values():
                self._pool.give(index, slab)
        self._folds = [Fold(_add, self._releaser(b.index)) for b in self._buckets]
        self._on_bucket = None
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def push(self, node: Node, slabs: Sequence[Slab] | None) -> None:
        for index, fold in enumerate(self._folds):
            fold.push(node, None if slabs is None else slabs[index])

    def add(self, leaf: Node) -> None:
        for bucket in self._buckets:
            self._add_bucket(bucket, leaf)

    def arm(self, leaf: Node, behind: Sequence[Pushed], on_bucket: OnBucket) -> None:
        self._leaf = leaf
        self._behind = behind
        self._on_bucket = on_bucket
        self._waiting = [len(bucket.parameters) for bucket in self._buckets]
        self._next = 0

    def finish(self) -> None:
        """Hand over the buckets that backward did not complete (parameters without a gradient)."""
        while self._next < len(self._buckets):
            self._complete()
        self._on_bucket = None

    def hand_over(self, on_bucket: OnBucket) -> None:
        for index, fold in enumerate(self._folds):
            on_bucket(index, fold.partials)

    def take(self) -> dict[Node, list[Slab]]:
        """The partial sums, no longer this object's. Call it between leaves, or after `finish`."""
        folds, self._folds = self._folds, []
        nodes = folds[0].partials if folds else ()
        return {node: [fold.partials[node] for fold in folds] for node in nodes}

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._on_bucket is None:
                return
            self._waiting[index] -= 1
            if self._waiting[index] < 0:
                raise RuntimeError(
                    "a parameter received its gradient twice in one backward pass; "
                    "activation checkpointing must run with use_reentrant=False"
                )
            while self._next < len(self._waiting) and self._waiting[self._next] == 0:
                self._complete()

        return hook

    def _complete(self) -> None:
        assert self._on_bucket is not None
        index = self._next
        self._add_bucket(self._buckets[index], self._leaf)
        for node, slabs in self._behind:
            self._folds[index].push(node, None if slabs is None else slabs[index])
        self._next += 1
        self._on_bucket(index, self._folds[index].partials)

    def _add_bucket(self, bucket: Bucket, leaf: Node) -> None:
        """Move the gradients of one bucket out of the parameters, into their leaf or the waiting sibling."""
        fold = self._folds[bucket.index]
        slab = fold.pop_left_sibling(leaf)
        in_place = slab is not None
        if slab is None:
            slab = self._pool.take(bucket.index)
        gradients = [p.grad for p in bucket.parameters]
        for parameter in bucket.parameters:
            parameter.grad = None
        _deposit(slab, gradients, in_place)
        fold.push(leaf.parent if in_place else leaf, slab)

    def _releaser(self, index: int) -> Callable[[Slab], None]:
        return lambda slab: self._pool.give(index, slab)


def _add(left: Slab, right: Slab) -> Slab:
    left.flat.add_(right.flat)
    return left


def _deposit(slab: Slab, gradients: list[torch.Tensor | None], add: bool) -> None:
    """Copy or add gradients and presences; a missing gradient counts as zeros, as it would from another
    rank.
    """
    dense = [g for g in gradients if g is not None]
    if any(g.layout is not torch.strided for g in dense):
        raise TypeError("a parameter has a sparse gradient; use dense ones (for nn.Embedding: sparse=False)")
    if len(dense) == len(gradients):
        if add:
            torch._foreach_add_(slab.views, dense)
            slab.presence.add_(1)
        else:
            torch._foreach_copy_(slab.views, dense)
            slab.presence.fill_(1)
        return
    for i, (view, gradient) in enumerate(zip(slab.views, gradients, strict=True)):
        value = torch.zeros_like(view) if gradient is None else gradient
        presence = float(gradient is not None)
        if add:
            view.add_(value)
            slab.presence[i].add_(presence)
        else:
            view.copy_(value)
            slab.presence[i].fill_(presence)


def _after_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
