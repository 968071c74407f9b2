"""A worker's place in a generation, and the settings that a step depends on."""

from __future__ import annotations

from dataclasses import dataclass

from worldline.collective.group import Group
from worldline.world import ShardRange


@dataclass(frozen=True)
class EngineSettings:
    """The parts of the job that a step depends on."""

    num_shards: int
    seed: int
    clip_norm: float | None
    skip_nonfinite: bool
    bf16: bool
    bitwise: bool


@dataclass(frozen=True)
class Membership:
    """This worker's place in one generation. group is None in a world of one."""

    generation: int
    attempt: int
    rank: int
    ranges: tuple[ShardRange, ...]
    group: Group | None

    @property
    def shards(self) -> ShardRange:
        return self.ranges[self.rank]

    @property
    def size(self) -> int:
        return len(self.ranges)
