"""The step as a transaction: compute, reduce, decide, apply. A reader sees the whole step here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worldline.collective.buckets import Slab, gradient_buckets
from worldline.collective.exchange import BitwiseExchange, NativeExchange, WordExchange, exchange_bytes
from worldline.collective.group import Abandoned, CollectiveFailed, Group
from worldline.collective.sums import GradientSums
from worldline.collective.tree import Node
from worldline.data.ledger import rows_digest
from worldline.data.loader import Loader, MicroBatch
from worldline.events import StepRecord
from worldline.task import Loss, Task
from worldline.worker.buffers import BufferSums
from worldline.worker.kept import Finished, Kept, Visit, walk
from worldline.worker.metrics import MetricSums, combine_metrics
from worldline.worker.rng import seed_all
from worldline.worker.words import StepTotals, StepWords
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


class StepPlan(Protocol):
    """What the engine asks of the sample plan."""

    def locate(self, step: int) -> tuple[int, int]: ...

    def step_rows(self, step: int) -> tuple[int, ...]: ...


class NonFinite(RuntimeError):
    """The combined loss or gradient of a step is NaN or infinite; every rank raises it alike."""

    def __init__(self, step: int, what: str, shards: tuple[int, ...]) -> None:
        where = f" (logical shards {', '.join(map(str, shards))})" if shards else ""
        super().__init__(f"{what} is not finite at step {step}{where}")
        self.step = step
        self.shards = shards


class TornState(RuntimeError):
    """The update itself failed half-way: this worker's state is of no step any more."""


@dataclass(frozen=True)
class Completed:
    """A step that this worker completed. halt: some rank was asked to stop at this border."""

    record: StepRecord
    halt: bool


class Engine:
    """Model, optimizer and scheduler of one worker, moved one whole step at a time.

    Protocol: `join(membership)` after the group is formed and the state agreed on; then `step()` again and
    again. Until the optimizer's update nothing of the state has changed, so when `step()` raises
    (CollectiveFailed, Abandoned, NonFinite, the task's own error) the worker is at the step before, whole;
    when it returns, at the next. Only TornState, an error inside the update, leaves no state. `completed` is
    the number of completed steps and is set by whoever loads a state. `phase` may be read from other threads.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        plan: StepPlan,
        loader: Loader,
        settings: EngineSettings,
        device: torch.device,
    ) -> None:
        self.completed = 0
        self.phase = "idle"
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._plan = plan
        self._loader = loader
        self._settings = settings
        self._device = device
        self._buckets = gradient_buckets(model)
        self._sums = GradientSums(self._buckets)
        self._buffers = BufferSums(model, len(self._buckets))
        self._cancelled: Callable[[], bool] = lambda: False
        self._broken: CollectiveFailed | Abandoned | None = None
        self._finished = Finished(0)
        model.train()

    def join(self, membership: Membership, cancelled: Callable[[], bool]) -> None:
        self._membership = membership
        self._cancelled = cancelled
        self._sums.renew()
        buckets = [*self._buckets, *self._buffers.buckets]
        group, ranges, rank = membership.group, membership.ranges, membership.rank
        self._exchange = (
            BitwiseExchange(group, buckets, ranges, self._settings.num_shards, rank)
            if self._settings.bitwise
            else NativeExchange(group, buckets)
        )
        self._word_exchange = WordExchange(group, ranges, rank)
        self._loader.focus(membership.shards.shards, self.completed + 1)

    def step(self, *, halt: bool, digest: Callable[[int], str | None]) -> Completed:
        """Complete one step. halt: this rank asks all to stop after it. digest(step) -> state digest if
        due.
        """
        clock = _Clock()
        step = self.completed + 1
        self._buffers.begin()
        try:
            totals, metrics, slabs = self._reduce(step, halt, clock)
            applied, norm = self._decide(step, totals, slabs)
        except BaseException:
            self._buffers.restore()
            raise
        lr = float(self._optimizer.param_groups[0]["lr"])
        try:
            self._apply(applied, totals, slabs)
            state_digest = digest(step)
        except Exception as error:
            raise TornState(f"the update of step {step} failed: {error}") from error
        self.completed = step
        self.phase = "report"
        epoch, _ = self._plan.locate(step)
        member = self._membership
        step_s = clock.since_start()
        return Completed(
            StepRecord(
                step=step,
                epoch=epoch,
                loss=totals.loss_sum / totals.weight,
                lr=lr,
                grad_norm=norm,
                rows=totals.rows,
                world=member.size,
                generation=member.generation,
                attempt=member.attempt,
                step_s=step_s,
                data_s=clock.data_s,
                compute_s=step_s - clock.data_s - clock.reduce_s,
                reduce_s=clock.reduce_s,
                state_digest=state_digest,
                rows_digest=totals.rows_digest,
                time=time.time(),
                skipped=not applied,
                metrics=metrics,
            ),
            totals.halt,
        )

    # 1 and 2: gradients of the own shards, folded; their exchange starts inside the last backward

    def _reduce(
        self, step: int, halt: bool, clock: _Clock
    ) -> tuple[StepTotals, dict[str, float], list[Slab]]:
        rows = self._plan.step_rows(step)
        owned = self._membership.shards
        finished = self._finished if self._finished.step == step else Finished(step)
        self._finished = Finished(step)
        self._sums.begin()
        self._exchange.begin(frozenset(v for v, n in enumerate(rows) if n))
        words = StepWords(owned.start, owned.stop - owned.start, self._buffers.num_integers)
        if halt:
            words.request_halt()
        metrics: dict[int, bytes] = {}
        self._broken = None
        try:
            self._compute_all(step, rows, finished, words, metrics, clock)
            clock.start_reduce()
            self.phase = "reduce"
            if self._broken is not None:
                raise self._broken
            totals = StepTotals.combine(self._word_exchange.finish())
            slabs = self._exchange.finish()
            combined = self._combine_metrics(metrics, totals)
        except (CollectiveFailed, Abandoned):
            self._keep(step, words, metrics)
            raise
        clock.end_reduce()
        return totals, combined, slabs

    def _compute_all(
        self,
        step: int,
        rows: Sequence[int],
        finished: Finished,
        words: StepWords,
        metrics: dict[int, bytes],
        clock: _Clock,
    ) -> None:
        """Every own shard in order: computed, taken from what was finished in an earlier try, or absent."""
        visits = list(walk(self._membership.shards, rows, finished.sums))
        to_compute = [i for i, visit in enumerate(visits) if not visit.kept and not visit.absent]
        last = to_compute[-1] if to_compute else len(visits)
        for visit in visits[:last]:
            if self._cancelled():
                raise Abandoned(f"gave up step {step} at logical shard {visit.node.start} on order")
            if visit.kept or visit.absent:
                self._pass(visit, finished, words, metrics)
            else:
                shard = visit.node.start
                self._compute(step, shard, rows[shard], words, metrics, clock)
                if self._settings.bitwise:
                    self._sums.add(visit.node)
        if not to_compute:
            self._start_words(step, words)
            self._sums.hand_over(self._start_bucket)
            return
        for visit in visits[last + 1 :]:
            self._take_words(visit, finished, words, metrics)
        behind = [(visit.node, self._kept(visit, finished)) for visit in visits[last + 1 :]]
        shard = visits[last].node.start
        self._compute(step, shard, rows[shard], words, metrics, clock, behind)
        self._sums.finish()

    def _compute(
        self,
        step: int,
        shard: int,
        expected_rows: int,
        words: StepWords,
        metrics: dict[int, bytes],
        clock: _Clock,
        behind: Sequence[tuple[Node, Kept | None]] | None = None,
    ) -> None:
        """One logical shard: its micro-batches one by one, never merged with another's.

        behind: what comes after the last shard to compute; None for the shards before it.
        """
        self._buffers.restore()
        self.phase = "data"
        began = time.perf_counter()
        batches = self._loader.batches(step, shard)
        clock.data_s += time.perf_counter() - began
        self.phase = "compute"
        sums = MetricSums()
        row_ids = np.concatenate([batch.row_ids for batch in batches])
        if len(row_ids) != expected_rows:
            raise RuntimeError(
                f"shard {shard} of step {step}: {len(row_ids)} rows came, {expected_rows} are planned"
            )
        for micro, batch in enumerate(batches):
            seed_all(self._settings.seed, step, shard, micro)
            loss = self._forward(batch)
            sums.add(loss)
            if micro == len(batches) - 1:
                metrics[shard] = sums.encode()
                digest = rows_digest(row_ids)
                words.set(shard, sums.loss, sums.weight, expected_rows, digest, len(metrics[shard]))
                words.set_extra(shard, self._buffers.add(Node(0, shard), expected_rows))
                if behind is not None:
                    self._start_last(step, shard, words, behind)
            loss.sum.backward()  # type: ignore[no-untyped-call]

    def _start_last(
        self, step: int, shard: int, words: StepWords, behind: Sequence[tuple[Node, Kept | None]]
    ) -> None:
        """Before the last backward: words and buffers can go, gradients go bucket by bucket."""
        for node, kept in behind:
            self._buffers.push(node, kept and kept[1])
        self._start_words(step, words)
        pushed = [(node, kept and kept[0]) for node, kept in behind] if self._settings.bitwise else []
        self._sums.arm(Node(0, shard), pushed, self._start_bucket)

    def _pass(self, visit: Visit, finished: Finished, words: StepWords, metrics: dict[int, bytes]) -> None:
        """A shard that need not be computed."""
        kept = self._kept(visit, finished)
        if self._settings.bitwise:
            self._sums.push(visit.node, kept and kept[0])
        self._buffers.push(visit.node, kept and kept[1])
        self._take_words(visit, finished, words, metrics)

    @staticmethod
    def _kept(visit: Visit, finished: Finished) -> Kept | None:
        return finished.sums[visit.node] if visit.kept else None

    @staticmethod
    def _take_words(visit: Visit, finished: Finished, words: StepWords, metrics: dict[int, bytes]) -> None:
        for shard in range(visit.node.start, visit.node.stop):
            if shard in finished.words:
                words.put(shard, finished.words[shard])
                metrics[shard] = finished.metrics[shard]

    def _keep(self, step: int, words: StepWords, metrics: dict[int, bytes]) -> None:
        """The step is not completed; what is done of it stays good."""
        if not self._settings.bitwise:
            return
        gradients = self._sums.take()
        buffers = self._buffers.take()
        for node, slabs in gradients.items():
            self._finished.sums[node] = (slabs, buffers.get(node, []))
            for shard in range(node.start, node.stop):
                if shard in metrics:
                    self._finished.words[shard] = words.get(shard)
                    self._finished.metrics[shard] = metrics[shard]

    # An exchange that fails inside backward must not end it: the shard's sums would be torn between buckets.

    def _start_words(self, step: int, words: StepWords) -> None:
        self._unless_broken(lambda: self._word_exchange.start(words.tensor, f"words of step {step}"))

    def _start_bucket(self, index: int, partials: dict[Node, Slab]) -> None:
        self._unless_broken(lambda: self._exchange.start(index, partials))
        self._unless_broken(self._exchange.advance)
        if index == len(self._buckets) - 1:
            for i, bucket in enumerate(self._buffers.buckets):
                self._start_bucket_of_buffers(bucket.index, self._buffers.partials(i))

    def _start_bucket_of_buffers(self, index: int, partials: dict[Node, Slab]) -> None:
        self._unless_broken(lambda: self._exchange.start(index, partials))

    def _unless_broken(self, call: Callable[[], None]) -> None:
        """Note the first failure, to be raised after the backward; start nothing after it."""
        if self._broken is None:
            try:
                call()
            except (CollectiveFailed, Abandoned) as error:
                self._broken = error

    def _forward(self, batch: MicroBatch) -> Loss:
        columns = {name: _to(value, self._device) for name, value in batch.columns.items()}
        with self._autocast():
            result = self._task.loss(self._model, columns)
        if isinstance(result, Loss):
            return result
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise TypeError(
                f"{type(self._task).__name__}.loss must return a scalar tensor or a worldline.Loss, "
                f"not {type(result).__name__}{list(getattr(result, 'shape', []))}"
            )
        rows = len(batch.row_ids)
        # A loss in bf16 could not hold the product.
        return Loss(result.to(torch.promote_types(result.dtype, torch.float32)) * rows, rows)

    def _autocast(self) -> AbstractContextManager[object]:
        if not self._settings.bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def _combine_metrics(self, metrics: dict[int, bytes], totals: StepTotals) -> dict[str, float]:
        if not any(totals.metrics_lengths):
            return {}
        member = self._membership
        lengths = [sum(totals.metrics_lengths[r.start : r.stop]) for r in member.ranges]
        mine = b"".join(metrics[shard] for shard in sorted(metrics))
        joined = b"".join(exchange_bytes(member.group, mine, lengths, "metrics"))
        return combine_metrics(joined, totals.metrics_lengths)

    # 3: on combined values only, alike on all ranks

    def _decide(self, step: int, totals: StepTotals, slabs: list[Slab]) -> tuple[bool, float]:
        """Scale the sums to the clipped mean gradient. Returns (whether to update, norm before clipping)."""
        self.phase = "update"
        if totals.weight <= 0:
            raise ValueError(
                f"the loss weights of step {step} add up to {totals.weight}; they must be positive"
            )
        gradients = [slab.gradients for slab in slabs[: len(self._buckets)]]
        norms = [
            float(torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32)))
            for flat in gradients
        ]
        squares = [norm * norm for norm in norms]
        norm = math.sqrt(math.fsum(squares)) / totals.weight if all(map(math.isfinite, squares)) else math.nan
        finite = math.isfinite(norm) and math.isfinite(totals.loss_sum)
        if not finite:
            if not self._settings.skip_nonfinite:
                what = "the loss" if totals.nonfinite_shards else "the gradient norm"
                raise NonFinite(step, what, totals.nonfinite_shards)
            return False, norm
        scale = 1.0 / totals.weight
        if self._settings.clip_norm is not None:
            scale *= min(1.0, self._settings.clip_norm / (norm + 1e-6))
        for flat in gradients:
            flat.mul_(scale)
        return True, norm

    # 4: the update; from here the step is completed

    def _apply(self, update: bool, totals: StepTotals, slabs: list[Slab]) -> None:
        if update:
            for bucket, slab in zip(self._buckets, slabs, strict=False):
                used = slab.presence.tolist()
                for parameter, view, count in zip(bucket.parameters, slab.views, used, strict=True):
                    parameter.grad = view if count else None
            self._optimizer.step()
            self._buffers.apply(slabs[len(self._buckets) :], totals.rows, totals.extra)
        else:
            self._buffers.restore()
        if self._scheduler is not None:
            self._scheduler.step()


class _Clock:
    """Where the time of one step goes, in seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._reduce_start = 0.0
        self.data_s = 0.0
        self.reduce_s = 0.0

    def start_reduce(self) -> None:
        self._reduce_start = time.perf_counter()

    def end_reduce(self) -> None:
        self.reduce_s = time.perf_counter() - self._reduce_start

    def since_start(self) -> float:
        return time.perf_counter() - self._start


def _to(value: object, device: torch.device) -> object:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
