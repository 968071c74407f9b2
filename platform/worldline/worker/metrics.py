"""The task's own numbers: summed a shard, sent as JSON, combined as weighted means over the canonical tree.

Shards may report different names: a mean is over the shards that had the name.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence

import torch

from worldline.collective.tree import Node, total
from worldline.task import Loss


class MetricSums:
    """Loss, weight and metrics of one shard, added up over its micro-batches in order."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.weight = 0.0
        self._metrics: dict[str, tuple[float, float]] = {}

    def add(self, loss: Loss) -> None:
        weight = float(loss.weight)
        self.loss += float(loss.sum.detach())
        self.weight += weight
        if loss.metrics:
            self.add_metrics(loss.metrics, weight)

    def add_metrics(self, metrics: Mapping[str, float | torch.Tensor], weight: float) -> None:
        if not weight:
            return  # means over nothing
        for name, value in metrics.items():
            before, weight_before = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = (before + float(value) * weight, weight_before + weight)

    def encode(self) -> bytes:
        return json.dumps(self._metrics, sort_keys=True).encode() if self._metrics else b""


def combine_metrics(joined: bytes, lengths: Sequence[int]) -> dict[str, float]:
    """joined: the encoded metrics of all shards in shard order, `lengths` bytes each."""
    sums: dict[str, dict[Node, float]] = {}
    weights: dict[str, dict[Node, float]] = {}
    start = 0
    for shard, length in enumerate(lengths):
        if length:
            for name, (value, weight) in json.loads(joined[start : start + length]).items():
                sums.setdefault(name, {})[Node(0, shard)] = value
                weights.setdefault(name, {})[Node(0, shard)] = weight
        start += length
    means = {}
    for name in sorted(sums):
        weight = total(weights[name], len(lengths), operator.add)
        means[name] = total(sums[name], len(lengths), operator.add) / weight if weight else float("nan")
    return means
