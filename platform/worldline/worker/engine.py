"""The step as a transaction: reduce, decide, apply. A reader sees the whole step here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worldline.collective.buckets import Slab
from worldline.data.loader import Loader, MicroBatch
from worldline.events import StepRecord
from worldline.task import Task
from worldline.worker.agree import Agreement
from worldline.worker.member import EngineSettings, Membership
from worldline.worker.peers import AfterStep
from worldline.worker.reduction import Reduced, Reduction, StepClock


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

    Protocol: `join(membership)` after the group is formed, while the state is agreed on; then `step()` again
    and again. Until the optimizer's update nothing of the state has changed, so when `step()` raises
    (CollectiveFailed, Abandoned, Disagreed, NonFinite, the task's own error) the worker is at the step
    before, whole; when it returns, at the next. Only TornState, an error inside the update, leaves no state.
    `completed` is the number of completed steps and is set by whoever loads a state. `phase` may be read from
    other threads.
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
        self.model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._plan = plan
        self._settings = settings
        self._reduction = Reduction(task, model, loader, settings, device)
        self._after_step = AfterStep(task)
        model.train()

    @property
    def phase(self) -> str:
        return self._reduction.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._reduction.phase = phase

    @property
    def doing(self) -> tuple[str, float]:
        """The phase, and since when (seconds of `time.monotonic`)."""
        return self._reduction.doing

    def rehearse(self, batch: MicroBatch) -> None:
        """A step on this micro-batch, without the others: whoever calls this puts the state back."""
        self._update(self._reduction.rehearse(batch))

    def join(
        self, membership: Membership, cancelled: Callable[[], bool], agreement: Agreement | None = None
    ) -> None:
        """agreement: to be finished before the first update."""
        self._membership = membership
        self._after_step.join(membership.group, membership.rank, membership.size)
        self._reduction.join(membership, cancelled, agreement, self.completed + 1)

    def step(self, *, halt: bool, digest: Callable[[int], str | None]) -> Completed:
        """Complete one step. halt: this rank asks all to stop after it. digest(step) -> state digest if
        due.
        """
        clock = StepClock()
        step = self.completed + 1
        rows = self._plan.step_rows(step)
        buffers = self._reduction.buffers
        try:
            reduced = self._reduction.reduce(step, rows, halt, clock)
            applied, norm = self._decide(step, reduced)
        except BaseException:
            buffers.restore()
            raise
        lr = float(self._optimizer.param_groups[0]["lr"])
        try:
            self._apply(applied, reduced)
            state_digest = digest(step)
        except BaseException as error:  # sys.exit() in an optimizer's hook tears the state as well
            raise TornState(f"the update of step {step} failed: {error}") from error
        self.completed = step
        self.phase = "report"
        epoch, _ = self._plan.locate(step)
        member, totals = self._membership, reduced.totals
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
                metrics=reduced.metrics,
            ),
            totals.halt,
        )

    def after_step(self) -> None:
        """What the task does after the step just completed. Raises what it raises, and CollectiveFailed or
        Abandoned; the state stays that of the step."""
        if self._after_step.wanted:
            self.phase = "after_step"
            self._after_step.call(self.completed)

    def _decide(self, step: int, reduced: Reduced) -> tuple[bool, float]:
        """On combined values only, alike on all ranks: scale the sums to the clipped mean gradient.

        Returns (whether to update, norm before clipping).
        """
        self.phase = "update"
        totals = reduced.totals
        if totals.weight <= 0:
            raise ValueError(
                f"the loss weights of step {step} add up to {totals.weight}; they must be positive"
            )
        gradients = [slab.gradients for slab in reduced.gradients]
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

    def _apply(self, update: bool, reduced: Reduced) -> None:
        """From here the step is completed."""
        reduction = self._reduction
        if update:
            self._update(reduced.gradients)
            reduction.buffers.apply(reduced.buffers, reduced.totals.rows, reduced.totals.extra)
        else:
            reduction.buffers.restore()
        if self._scheduler is not None:
            self._scheduler.step()

    def _update(self, gradients: Sequence[Slab]) -> None:
        """gradients: one slab a bucket. A parameter that no shard had a gradient for keeps none."""
        for bucket, slab in zip(self._reduction.gradient_buckets, gradients, strict=True):
            used = slab.presence.tolist()
            for parameter, view, count in zip(bucket.parameters, slab.views, used, strict=True):
                parameter.grad = view if count else None
        self._optimizer.step()
