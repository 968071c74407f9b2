"""The sample plans of a job, built alike by the controller and by every worker. Pure."""

from __future__ import annotations

from worldline.data.manifest import Manifest
from worldline.data.plan import Plan
from worldline.job.spec import Job


def training_plan(job: Job, manifest: Manifest, transform_digest: str) -> Plan:
    return Plan(
        manifest,
        seed=job.seed,
        num_shards=job.batch.logical_shards,
        rows_per_shard=job.batch.rows_per_shard * job.batch.accumulate,
        window_rows=job.data.window_rows,
        shuffle=job.data.shuffle,
        transform=job.data.train.transform,
        transform_digest=transform_digest,
    )


def validation_plan(job: Job, manifest: Manifest, transform_digest: str) -> Plan:
    """Its epoch 0 is one pass over the validation rows, in file order."""
    assert job.data.validation is not None
    return Plan(
        manifest,
        seed=job.seed,
        num_shards=job.batch.logical_shards,
        rows_per_shard=job.batch.rows_per_shard,
        window_rows=job.data.window_rows,
        shuffle=False,
        transform=job.data.validation.transform,
        transform_digest=transform_digest,
        allow_short=True,
    )
