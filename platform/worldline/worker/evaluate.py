"""One pass over the validation rows: each row once, the same numbers whatever the world."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from worldline.collective.exchange import WordExchange, exchange_bytes
from worldline.collective.group import Abandoned
from worldline.data.loader import Loader
from worldline.data.plan import Plan
from worldline.events import EvaluationRecord
from worldline.task import Task
from worldline.worker.buffers import BufferSums
from worldline.worker.member import Membership
from worldline.worker.metrics import MetricSums, combine_metrics
from worldline.worker.rng import seed_all


class Evaluator:
    """Runs `task.evaluate` on this replica's shards of the validation plan and combines over the tree.

    The loader is focused on the shards of a membership by `join`. `run` changes nothing of the training state
    and raises as the engine's step does, so it can simply be done again. `waits_for_rows` may be read from
    other threads.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, plan: Plan, loader: Loader, seed: int, device: torch.device
    ) -> None:
        self._task = task
        self._model = model
        self._buffers = BufferSums(model, 0)
        self._plan = plan
        self._loader = loader
        self._seed = seed
        self._device = device
        self.waits_for_rows = False

    def join(self, membership: Membership, cancelled: Callable[[], bool]) -> None:
        self._membership = membership
        self._cancelled = cancelled

    def run(self, step: int) -> EvaluationRecord:
        """Evaluate the state after `step`."""
        began = time.perf_counter()
        member = self._membership
        self._loader.focus(member.shards.shards, 1)
        self._buffers.begin()
        self._model.eval()
        try:
            with torch.no_grad():
                blobs = [self._shard(step, shard) for shard in member.shards.shards]
        finally:
            self._model.train()
            self._buffers.restore()
        words = WordExchange(member.group, member.ranges, member.rank)
        words.start(torch.tensor([[len(blob)] for blob in blobs]), f"evaluation after step {step}")
        lengths = [int(n) for n in words.finish()[:, 0]]
        by_rank = [sum(lengths[r.start : r.stop]) for r in member.ranges]
        joined = b"".join(exchange_bytes(member.group, b"".join(blobs), by_rank, "evaluation"))
        return EvaluationRecord(
            step=step,
            rows=self._plan.manifest.num_rows,
            metrics=combine_metrics(joined, lengths),
            seconds=time.perf_counter() - began,
            generation=member.generation,
            attempt=member.attempt,
        )

    def _shard(self, step: int, shard: int) -> bytes:
        sums = MetricSums()
        for part in range(1, self._plan.steps_per_epoch + 1):
            self.waits_for_rows = True
            batches = self._loader.batches(part, shard, cancelled=self._cancelled)
            self.waits_for_rows = False
            for micro, batch in enumerate(batches):
                if self._cancelled():
                    raise Abandoned(f"gave up evaluating after step {step} on order")
                seed_all(self._seed, -step, shard, part, micro)
                columns = {
                    name: value.to(self._device) if isinstance(value, torch.Tensor) else value
                    for name, value in batch.columns.items()
                }
                sums.add_metrics(self._task.evaluate(self._model, columns), len(batch.row_ids))
        return sums.encode()
