"""What a worker has finished of a step that was not completed, so that it need not be computed again.

A survivor's sums of the shards it had finished stay valid in the next generation: the state has not changed,
and what a shard gives depends on nothing but the state, the step and the shard. They are kept as whole
subtrees, so they are of use where the worker still owns all shards of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldline.collective.buckets import Slab
from worldline.collective.tree import Node
from worldline.world import ShardRange

Words = npt.NDArray[np.int64]

Kept = tuple[list[Slab], list[Slab]]
"""A subtree's gradient slabs and buffer slabs, one a bucket each."""


@dataclass
class Finished:
    """Shards of `step` that are done, as subtrees. words, metrics: of each of these shards, as they go
    through the exchange.
    """

    step: int
    sums: dict[Node, Kept] = field(default_factory=dict)
    words: dict[int, Words] = field(default_factory=dict)
    metrics: dict[int, bytes] = field(default_factory=dict)


class Visit(NamedTuple):
    """One stop on the way through a range: a subtree that is kept or absent, or a shard to compute."""

    node: Node
    kept: bool = False
    absent: bool = False


def walk(owned: ShardRange, rows: Sequence[int], kept: Mapping[Node, object]) -> Iterator[Visit]:
    """Every shard of `owned` once, in order. rows: of each shard in this step, 0 means absent."""
    by_start = {node.start: node for node in kept}
    shard = owned.start
    while shard < owned.stop:
        node = by_start.get(shard)
        if node is not None and node.stop <= owned.stop:
            yield Visit(node, kept=True)
            shard = node.stop
        else:
            yield Visit(Node(0, shard), absent=not rows[shard])
            shard += 1
