"""The job: all a user sets, checked. Each component is built from its own part; nobody gets the whole."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_ATTRIBUTE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
# The description of a field with a pattern is what the user is told to write.


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class TaskSpec(Section):
    """class: "module:Class" of a `worldline.Task`; args: its keyword arguments."""

    class_: Annotated[str, Field(alias="class", pattern=_ATTRIBUTE, description='"module:Class"')]
    args: dict[str, Any] = {}


class DatasetSpec(Section):
    """path: Parquet files, a glob or a folder. transform: "module:function", row to row, column-wise."""

    path: str
    transform: Annotated[str | None, Field(pattern=_ATTRIBUTE, description='"module:function"')] = None
    columns: list[str] | None = None


class DataSpec(Section):
    """window_rows: rows shuffled together and read ahead as one unit.

    pipeline: "ray" runs the transform in one Ray Data pipeline for the run, "local" in the worker's own
    reader thread; "auto" is "ray" where there is a transform. Both give the same rows.
    cpus: logical CPUs the Ray Data pipeline may use.
    """

    train: DatasetSpec
    validation: DatasetSpec | None = None
    shuffle: bool = True
    window_rows: PositiveInt = 4096
    pipeline: Literal["auto", "ray", "local"] = "auto"
    cpus: PositiveInt = 1


class BatchSpec(Section):
    """The global batch is the contract:
    logical_shards * rows_per_shard * accumulate rows, whatever the world.
    """

    logical_shards: PositiveInt
    rows_per_shard: PositiveInt
    accumulate: PositiveInt = 1

    @model_validator(mode="after")
    def _power_of_two(self) -> BatchSpec:
        if self.logical_shards & (self.logical_shards - 1):
            raise ValueError(f"logical_shards must be a power of two, not {self.logical_shards}")
        return self

    @property
    def global_rows(self) -> int:
        return self.logical_shards * self.rows_per_shard * self.accumulate


class WorldSpec(Section):
    """How many replicas, and what each gets. threads: intra-op threads of a worker, part of the numbers."""

    min: PositiveInt = 1
    max: PositiveInt = 1
    cpus_per_worker: PositiveFloat = 1
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0
    threads: PositiveInt = 1
    standby: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _ordered(self) -> WorldSpec:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class GradientSpec(Section):
    clip_norm: PositiveFloat | None = None
    nonfinite: Literal["fail", "skip"] = "fail"


class EvaluateSpec(Section):
    """Evaluation on data.validation after every so many steps, and after the last."""

    every_steps: PositiveInt = 100


class CheckpointSpec(Section):
    """storage: folder or s3:// URL that holds the run; the command line's --storage goes before it."""

    every_steps: PositiveInt = 100
    keep: PositiveInt = 3
    storage: str | None = None


class TrackingSpec(Section):
    """uri: an MLflow server; null: SQLite beside the runs. enabled: false writes no MLflow run."""

    uri: str | None = None
    experiment: str = "worldline"
    enabled: bool = True


class FailureSpec(Section):
    """When to give up.

    task_errors: how often the user's code may raise. no_progress: restarts without a new completed step.
    start_timeout_s: seconds in which world.min workers must be ready. timeout_s: the longest a worker waits
    for its peers inside a step; must exceed what the slowest replica computes between two exchanges.
    silent_s: a worker whose process gives no sign of life for so long is given up. hang_s: a world that
    completes no step for so long, and for 20 usual steps, is looked into, and who holds it up is replaced.
    """

    task_errors: PositiveInt = 3
    no_progress: PositiveInt = 3
    start_timeout_s: PositiveFloat = 300
    timeout_s: PositiveFloat = 300
    silent_s: Annotated[float, Field(ge=1)] = 3
    hang_s: PositiveFloat = 10

    @model_validator(mode="after")
    def _ordered(self) -> FailureSpec:
        if self.silent_s >= self.timeout_s:
            raise ValueError(
                f"silent_s ({self.silent_s:g}) must be less than timeout_s ({self.timeout_s:g}), "
                "which is for workers that are not silent"
            )
        return self


class Job(Section):
    """One logical training."""

    name: Annotated[str, Field(pattern=_NAME, description="letters, digits, '.', '_' and '-'")]
    task: TaskSpec
    data: DataSpec
    batch: BatchSpec
    world: WorldSpec = WorldSpec()
    gradient: GradientSpec = GradientSpec()
    precision: Literal["fp32", "bf16"] = "fp32"
    mode: Literal["bitwise", "same_batches"] = "bitwise"
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    digest_every_steps: PositiveInt = 50
    evaluate: EvaluateSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    failure: FailureSpec = FailureSpec()

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if self.steps is None and self.epochs is None:
            raise ValueError("neither steps nor epochs is given: say how long to train, with one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps ({self.steps}) and epochs ({self.epochs}) are both given: take one out; over a job "
                "file, --set steps=null or --set epochs=null does"
            )
        if self.world.max > self.batch.logical_shards:
            raise ValueError(
                f"world.max ({self.world.max}) must not exceed "
                f"batch.logical_shards ({self.batch.logical_shards})"
            )
        if self.evaluate is not None and self.data.validation is None:
            raise ValueError("evaluate needs data.validation")
        return self
