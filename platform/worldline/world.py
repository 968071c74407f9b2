"""Words everybody uses about the world: shards, ranges, positions. Pure; imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(frozen=True, order=True)
class Position:
    """How far a worker is on the training line; the larger position is the truth after a failure.

    step: number of completed optimizer steps (0 before the first).
    evaluated: whether the evaluation due after `step`, if any, is done.
    """

    step: int
    evaluated: bool = False
