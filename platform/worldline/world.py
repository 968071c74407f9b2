"""Words everybody uses about the world: shards, ranges, positions. Pure; imports nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


class ShardRange(NamedTuple):
    """The contiguous logical shards [start, stop) that one replica computes."""

    start: int
    stop: int

    @property
    def shards(self) -> range:
        return range(self.start, self.stop)


def assign(num_shards: int, num_replicas: int) -> tuple[ShardRange, ...]:
    """Cut 0..num_shards-1 into `num_replicas` contiguous ranges whose sizes differ by at most one.

    The larger ranges come first. The assignment decides who computes, never what is computed.

    Raises ValueError unless 1 <= num_replicas <= num_shards.
    """
    if not 1 <= num_replicas <= num_shards:
        raise ValueError(f"{num_shards} logical shards cannot be divided among {num_replicas} replicas")
    size, larger = divmod(num_shards, num_replicas)
    starts = [rank * size + min(rank, larger) for rank in range(num_replicas + 1)]
    return tuple(ShardRange(a, b) for a, b in pairwise(starts))


def assign_near(num_shards: int, before: Sequence[ShardRange | None]) -> tuple[ShardRange, ...]:
    """As `assign` to len(before) replicas, with the larger ranges where most shards stay with their owners.

    before: the range each replica had, None for a newcomer. A survivor that keeps its shards keeps their
    finished sums and the rows it has read.
    """
    num_replicas = len(before)
    size, larger = divmod(num_shards, num_replicas)
    if not larger or num_replicas > MAX_COMPARED or not any(before):
        return assign(num_shards, num_replicas)
    # best[k]: (most shards that stay, sizes) for the replicas so far with k larger ranges among them.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank, old in enumerate(before):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for count, (stay, sizes) in best.items():
            start = rank * size + count
            for extra in (0, 1):
                if count + extra > larger or larger - count - extra > num_replicas - rank - 1:
                    continue
                overlap = _overlap(ShardRange(start, start + size + extra), old)
                found = (stay + overlap, (*sizes, size + extra))
                if count + extra not in longer or found[0] > longer[count + extra][0]:
                    longer[count + extra] = found
        best = longer
    starts = list(accumulate(best[larger][1], initial=0))
    return tuple(ShardRange(a, b) for a, b in pairwise(starts))


MAX_COMPARED = 128
"""Beyond so many replicas a choice among assignments is not worth its time."""


def _overlap(a: ShardRange, b: ShardRange | None) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start)) if b is not None else 0


@dataclass(frozen=True, order=True)
class Position:
    """How far a worker is on the training line; the larger position is the truth after a failure.

    step: number of completed optimizer steps (0 before the first).
    evaluated: whether the evaluation due after `step`, if any, is done.
    """

    step: int
    evaluated: bool = False
