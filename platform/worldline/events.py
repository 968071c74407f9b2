"""What a run says about itself: completed steps, evaluations, events. Pure; imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class EventKind(StrEnum):
    """Every kind of line in `events.jsonl`."""

    ATTEMPT_STARTED = "attempt_started"  # a driver took the run
    GENERATION_FORMED = "generation_formed"  # a new process group trains
    WORKER_LOST = "worker_lost"  # a member died or did not answer
    WORKER_REQUESTED = "worker_requested"
    DRAINING = "draining"  # workers shall leave by a deadline
    WORKER_RELEASED = "worker_released"  # it left as planned, or was more than is wanted
    WORKER_READY = "worker_ready"  # a standby may be admitted
    WORKER_START_FAILED = "worker_start_failed"
    OUT_OF_MEMORY = "out_of_memory"  # why a worker is lost: Ray's memory monitor ended it
    HANG = "hang"  # no step was completed in time; the diagnosis names who and where
    COLLECTIVE_FAILED = "collective_failed"  # a process group broke, no member is known dead
    TASK_ERROR = "task_error"  # the user's code raised
    NONFINITE = "nonfinite"  # a loss or gradient was NaN or infinite
    WAITING = "waiting"  # below world.min
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_PASSED_OVER = "checkpoint_passed_over"  # damaged, torn or foreign
    RESTORED = "restored"  # state came from a checkpoint
    DEGRADED = "degraded"  # a promise holds less than configured, with the reason
    STOP_REQUESTED = "stop_requested"
    RESIZED = "resized"  # somebody asked for another number of workers
    FAULT_INJECTED = "fault_injected"  # the fault script did something to a worker
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Event:
    """One line of `events.jsonl`. time: Unix seconds of the controller. seconds: what it took, if timed."""

    time: float
    kind: EventKind
    generation: int
    step: int
    world_before: int
    world_after: int
    workers: tuple[str, ...] = ()
    reason: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """One completed optimizer step: one line of `steps.jsonl`, one point of every curve.

    step counts completed steps, from 1; epoch counts from 0. loss is the weighted mean over the global
    batch, grad_norm the norm of its gradient before clipping, lr the rate the step was taken with.
    Times are seconds on the reporting worker: step_s the whole step, data_s waiting for rows, compute_s
    forward, backward and update, reduce_s waiting for other replicas after the last backward ended.
    time is the worker's Unix time at completion. skipped marks a step whose update was left out
    because it was not finite. Names in `metrics` are the task's.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    rows: int
    world: int
    generation: int
    attempt: int
    step_s: float
    data_s: float
    compute_s: float
    reduce_s: float
    state_digest: str | None
    rows_digest: str
    time: float
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationRecord:
    """One pass over the validation rows after `step`: one line of `evaluations.jsonl`."""

    step: int
    rows: int
    metrics: dict[str, float]
    seconds: float
    generation: int
    attempt: int
