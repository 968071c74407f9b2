"""What an attempt is put together from: each part from the settings that concern it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldline.control.cluster import node_address
from worldline.control.decisions import Limits
from worldline.control.survey import Data
from worldline.data.feeder import start_feeder
from worldline.job.load import job_digest
from worldline.job.spec import Job
from worldline.tracking.embedded import embedded_uri
from worldline.tracking.mlflow import MlflowDelivery
from worldline.tracking.status import RunState, Status
from worldline.worker.orders import Setup


def uses_ray_data(job: Job) -> bool:
    pipeline = job.data.pipeline
    return pipeline == "ray" or (pipeline == "auto" and job.data.train.transform is not None)


def logical_cpus(job: Job) -> float:
    """What a cluster of our own must offer: the workers, those standing by, and the data pipeline."""
    workers = job.world.max + job.world.standby
    return workers * job.world.cpus_per_worker + (job.data.cpus if uses_ray_data(job) else 0)


def limits(job: Job) -> Limits:
    return Limits(
        min=job.world.min,
        max=job.world.max,
        standby=job.world.standby,
        num_shards=job.batch.logical_shards,
        start_s=job.failure.start_timeout_s,
        timeout_s=job.failure.timeout_s,
        hang_s=job.failure.hang_s,
    )


def beat_s(job: Job) -> float:
    """Seconds between a worker's signs of life: some within the time of silence, and not too many in all."""
    return max(job.failure.silent_s / 6, min(1.0, job.world.max / 2000))


def feeder(job: Job, data: Data, search: Sequence[Path], first_step: int, last_step: int) -> Any:
    """The run's Ray Data pipeline, None where the workers read themselves."""
    if not uses_ray_data(job):
        return None
    return start_feeder(
        data.plan,
        job.data.train.columns,
        first_step=first_step,
        last_step=last_step,
        cpus=job.data.cpus,
        import_paths=[str(folder) for folder in search],
    )


def worker_setup(
    job: Job,
    data: Data,
    search: Sequence[Path],
    *,
    storage_url: str,
    feeder: Any,
    store_port: int,
    attempt: int,
    last_step: int,
) -> Setup:
    validation = data.validation_manifest
    return Setup(
        job=job.model_dump(mode="json", by_alias=True),
        search=tuple(map(str, search)),
        storage=storage_url,
        manifest=data.manifest.to_json(),
        validation_manifest=validation.to_json() if validation else None,
        transform_digest=data.transform_digest,
        validation_transform_digest=data.validation_transform_digest,
        feeder=feeder,
        store_host=node_address(),
        store_port=store_port,
        attempt=attempt,
        last_step=last_step,
    )


def tracker(job: Job, folder: Path, attempt: int, last_step: int) -> MlflowDelivery | None:
    if not job.tracking.enabled:
        return None
    return MlflowDelivery.start(
        folder,
        job.tracking.uri or embedded_uri(folder.parent),
        job.tracking.experiment,
        job.name,
        params={
            "task": job.task.class_,
            "logical_shards": job.batch.logical_shards,
            "rows_per_shard": job.batch.rows_per_shard,
            "accumulate": job.batch.accumulate,
            "global_batch_rows": job.batch.global_rows,
            "seed": job.seed,
            "precision": job.precision,
            "mode": job.mode,
            "job_digest": job_digest(job),
        },
        tags={
            "attempt": attempt,
            "world.min": job.world.min,
            "world.max": job.world.max,
            "steps": last_step,
        },
    )


def first_status(job: Job, attempt: int, last_step: int, storage_url: str) -> Status:
    return Status(
        run=job.name,
        state=RunState.STARTING,
        reason="",
        step=0,
        steps=last_step,
        epoch=0,
        attempt=attempt,
        generation=0,
        world=0,
        min=job.world.min,
        max=job.world.max,
        workers=(),
        standbys=0,
        loss=None,
        rows_per_s=None,
        goodput=None,
        incidents=0,
        mlflow_run_id=None,
        storage=storage_url,
    )
