"""Buffers that training changes (BatchNorm's statistics), by a rule that does not depend on the world.

Every shard starts from the step's initial value, so what it adds does not depend on which shards ran before
it on the same worker. Floating-point buffers then move by the mean of the shards' changes, weighted by rows
and added over the canonical tree; integer buffers and flags (BatchNorm counts its calls) move by the largest
change of any shard, the same for all elements. Only persistent buffers take part: the others are no state
and are taken for constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from worldline.collective.buckets import Bucket, Slab, make_buckets
from worldline.collective.tree import Fold, Node


class BufferSums:
    """The buffers of one model over one step.

    Protocol: `begin()`; for each shard `restore()`, run it, `add(leaf, rows)`, or `push(node, slabs)` for
    what need not be run, as in GradientSums; `partials(i)` go through the exchange as further buckets;
    `apply(results, rows, moves)` or, where the step is not completed, `restore()`.
    """

    def __init__(self, model: torch.nn.Module, first_bucket: int) -> None:
        self._places = _persistent(model)
        self._float_places = [p for p in self._places if p.is_float]
        self._integer_places = [p for p in self._places if not p.is_float]
        self._floats = [_real(p.tensor) for p in self._float_places]
        self._integers = [p.tensor for p in self._integer_places]
        self._initial_floats = [b.clone() for b in self._floats]
        self._initial_integers = [b.clone() for b in self._integers]
        self.buckets: tuple[Bucket, ...] = make_buckets(self._floats, first_index=first_bucket)
        self._folds: list[Fold[Slab]] = []

    @property
    def num_integers(self) -> int:
        return len(self._integers)

    @torch.no_grad()
    def begin(self) -> None:
        for place in self._places:
            if (
                place.now is not place.tensor
            ):  # left there by an update that failed; a state was loaded into it
                place.tensor.copy_(place.now)
                place.holder[place.key] = place.tensor
        if self._floats:
            torch._foreach_copy_(self._initial_floats, self._floats)
        if self._integers:
            torch._foreach_copy_(self._initial_integers, self._integers)
        self._folds = [Fold(_add) for _ in self.buckets]

    @torch.no_grad()
    def restore(self) -> None:
        for place in self._places:
            place.holder[place.key] = place.tensor
        if self._floats:
            torch._foreach_copy_(self._floats, self._initial_floats)
        if self._integers:
            torch._foreach_copy_(self._integers, self._initial_integers)

    @torch.no_grad()
    def add(self, leaf: Node, rows: int) -> list[int]:
        """Take the shard's changes; returns the integer buffers' moves, a scalar each."""
        start = 0
        floats = [_real(place.now) for place in self._float_places]
        for bucket, fold in zip(self.buckets, self._folds, strict=True):
            slab = bucket.new_slab()
            stop = start + len(bucket.parameters)
            torch._foreach_copy_(slab.views, floats[start:stop])
            torch._foreach_sub_(slab.views, self._initial_floats[start:stop])
            slab.flat.mul_(rows)
            fold.push(leaf, slab)
            start = stop
        return [
            _move(place, before)
            for place, before in zip(self._integer_places, self._initial_integers, strict=True)
        ]

    def push(self, node: Node, slabs: Sequence[Slab] | None) -> None:
        for index, fold in enumerate(self._folds):
            fold.push(node, None if slabs is None else slabs[index])

    def take(self) -> dict[Node, list[Slab]]:
        """The partial sums, no longer this object's, to be pushed in a later try at the same step."""
        folds, self._folds = self._folds, []
        nodes = folds[0].partials if folds else ()
        return {node: [fold.partials[node] for fold in folds] for node in nodes}

    def partials(self, index: int) -> dict[Node, Slab]:
        return self._folds[index].partials

    @torch.no_grad()
    def apply(self, results: Sequence[Slab], rows: int, moves: Sequence[int]) -> None:
        self.restore()
        start = 0
        for bucket, slab in zip(self.buckets, results, strict=True):
            slab.flat.div_(rows)
            stop = start + len(bucket.parameters)
            torch._foreach_add_(self._floats[start:stop], slab.views)
            start = stop
        for buffer, move in zip(self._integers, moves, strict=True):
            buffer.copy_(buffer + move)


class _Place(NamedTuple):
    """Where a module keeps a buffer. tensor: the buffer as built; forward may put another there."""

    name: str
    holder: dict[str, torch.Tensor]
    key: str
    tensor: torch.Tensor

    @property
    def is_float(self) -> bool:
        return self.tensor.is_floating_point() or self.tensor.is_complex()

    @property
    def now(self) -> torch.Tensor:
        return self.holder[self.key]


def _persistent(model: torch.nn.Module) -> list[_Place]:
    names = set(model.state_dict(keep_vars=True))
    places = []
    for name, buffer in model.named_buffers():
        if name in names:
            path, _, key = name.rpartition(".")
            holder: Any = model.get_submodule(path)._buffers
            places.append(_Place(name, holder, key, buffer))
    return places


def _real(buffer: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _move(place: _Place, before: torch.Tensor) -> int:
    """By how much the shard moved an integer buffer."""
    if not before.numel() or torch.equal(place.now, before):
        return 0
    moves = place.now.long() - before.long()
    move = int(moves.max())
    if int(moves.min()) != move:
        raise ValueError(
            f"the elements of buffer {place.name} ({before.dtype}) changed by different amounts in one step, "
            "for which there is no rule that does not depend on the world: keep it as floating-point, where "
            "the mean change counts"
        )
    return move


def _add(left: Slab, right: Slab) -> Slab:
    left.flat.add_(right.flat)
    return left
