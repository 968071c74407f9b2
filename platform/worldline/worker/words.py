"""What every rank learns about every shard of a step: a fixed row of 64-bit words a shard."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worldline.collective.tree import Node, total
from worldline.data.ledger import step_digest

LOSS, WEIGHT, ROWS, ROWS_DIGEST, METRICS_LENGTH, HALT = range(6)
WIDTH = 6


class StepWords:
    """The words of this rank's shards, filled while they are computed. The tail holds integer buffers'
    steps.
    """

    def __init__(self, first_shard: int, num_shards: int, num_extra: int) -> None:
        self._first = first_shard
        self._words = np.zeros((num_shards, WIDTH + num_extra), dtype=np.int64)
        self._floats = self._words.view(np.float64)

    def set(self, shard: int, loss: float, weight: float, rows: int, rows_digest: int, metrics: int) -> None:
        row = shard - self._first
        self._floats[row, LOSS] = loss
        self._floats[row, WEIGHT] = weight
        self._words[row, ROWS] = rows
        self._words[row, ROWS_DIGEST] = np.uint64(rows_digest).astype(np.int64)
        self._words[row, METRICS_LENGTH] = metrics

    def set_extra(self, shard: int, values: list[int]) -> None:
        self._words[shard - self._first, WIDTH:] = values

    def get(self, shard: int) -> npt.NDArray[np.int64]:
        """A copy of a shard's words, to be `put` again in another try at the step."""
        words: npt.NDArray[np.int64] = self._words[shard - self._first].copy()
        words[HALT] = 0
        return words

    def put(self, shard: int, words: npt.NDArray[np.int64]) -> None:
        row = self._words[shard - self._first]
        halt = row[HALT]
        row[:] = words
        row[HALT] = halt

    def request_halt(self) -> None:
        self._words[0, HALT] = 1

    @property
    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self._words)


@dataclass(frozen=True)
class StepTotals:
    """The words of all shards, combined alike on every rank."""

    loss_sum: float
    weight: float
    rows: int
    rows_digest: str
    halt: bool
    nonfinite_shards: tuple[int, ...]
    metrics_lengths: tuple[int, ...]
    extra: tuple[int, ...]

    @classmethod
    def combine(cls, words: torch.Tensor) -> StepTotals:
        """words: int64 [num_shards, WIDTH + extra]. Sums go through the canonical tree."""
        table = words.numpy()
        floats = table.view(np.float64)
        num_shards = len(table)
        shards = [v for v in range(num_shards) if table[v, ROWS]]

        def tree_sum(column: int) -> float:
            values = {Node(0, v): float(floats[v, column]) for v in shards}
            return total(values, num_shards, operator.add)

        return cls(
            loss_sum=tree_sum(LOSS),
            weight=tree_sum(WEIGHT),
            rows=int(table[:, ROWS].sum()),
            rows_digest=step_digest(table[:, [ROWS, ROWS_DIGEST]]),
            halt=bool(table[:, HALT].any()),
            nonfinite_shards=tuple(v for v in shards if not np.isfinite(floats[v, LOSS])),
            metrics_lengths=tuple(int(n) for n in table[:, METRICS_LENGTH]),
            extra=tuple(int(n) for n in table[shards, WIDTH:].max(axis=0)) if table.shape[1] > WIDTH else (),
        )
