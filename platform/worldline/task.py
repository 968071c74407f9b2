"""What a user writes: a `Task`. Imports nothing of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Batch = dict[str, Any]
"""One micro-batch: column name -> tensor (numeric columns) or numpy object array, first axis the rows."""


@dataclass(frozen=True)
class Loss:
    """A loss that is not a plain mean over rows, say a mean over tokens that are not masked.

    sum: scalar tensor, the sum of the terms; weight: how many terms (or their total weight). The loss of the
    global batch is the sum of all sums over the sum of all weights, whatever the split.
    metrics: name -> mean over this micro-batch's weight; combined as weighted means, reported by step.
    """

    sum: torch.Tensor
    weight: float | torch.Tensor
    metrics: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


class Peers(Protocol):
    """The workers that completed a step together, for the task's own collectives in `after_step`.

    rank: this worker's, from 0 on; size: how many they are. Both change over a run, and so does who has
    which rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that all workers give, by rank: copies, on the device of `tensor`, without gradients.

        Every worker must make the same calls in the same order, with the same name, dtype and shape. Where
        they differ all raise `worldline.worker.peers.CollectiveMismatch`, which says who called what. To be
        called from the thread that runs `after_step`.
        """


class Task(ABC):
    """One training job's model, optimizer and loss. An instance lives on every worker.

    Protocol: `build_model`, `build_optimizer`, `build_scheduler` are called once per worker process, in this
    order, under the same seed on every worker. Then `loss` is called once per micro-batch of every logical
    shard, `evaluate` once per micro-batch of validation rows with the model in eval mode. Before each call
    every random generator (torch, random, numpy) is seeded from (seed, step, shard), so what a call draws
    does not depend on who computes it. Before it is admitted, a worker rehearses a step on rows of the first
    window, which calls `loss`, too, and then puts the state back: a first step may be slow. A task must not
    keep state that changes from call to call outside the model's parameters and buffers, the optimizer and
    the scheduler.
    """

    @abstractmethod
    def build_model(self) -> torch.nn.Module: ...

    @abstractmethod
    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer: ...

    def build_scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Optional; stepped once per optimizer step, whatever the world."""
        return None

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor | Loss:
        """The mean loss over the rows of `batch` as a scalar tensor, or a `Loss`."""

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, float | torch.Tensor]:
        """Optional: name -> mean over the rows of `batch`. Every validation row is seen exactly once."""
        raise NotImplementedError(f"{type(self).__name__} defines no evaluate()")

    def after_step(self, step: int, peers: Peers) -> None:  # noqa: B027
        """Optional: look at what was trained, after `step` steps are completed, on every worker alike.

        Must leave the model, the optimizer and the scheduler as they are. Called by each worker once it has
        completed a step; not for steps that it takes over from others. If it raises, or a worker is lost
        meanwhile, the step stays completed, and it is not called for this step again. Steps that are
        done again, as all who had completed them were lost, are followed by it again.
        """
