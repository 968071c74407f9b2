"""The job's data sets, looked at and planned before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from worldline.data.manifest import DataError, Manifest
from worldline.data.plan import Plan
from worldline.data.scan import scan
from worldline.data.transform import load_transform, transform_digest
from worldline.job.faults import JobError
from worldline.job.spec import DatasetSpec, Job
from worldline.worker.plans import training_plan, validation_plan


@dataclass(frozen=True)
class Data:
    """The data sets as the controller knows them. plan: of the training rows."""

    manifest: Manifest
    transform_digest: str
    validation_manifest: Manifest | None
    validation_transform_digest: str
    plan: Plan


def survey(job: Job) -> Data:
    """Look at the data sets and make the plan. Raises JobError at the setting to change."""
    try:
        manifest = scan(job.data.train.path, job.data.train.columns)
        digest = _transform_digest(job.data.train)
        plan = training_plan(job, manifest, digest)
    except DataError as error:
        raise JobError([f"data.train: {error}"]) from error
    validation, validation_digest = None, ""
    if job.data.validation is not None:
        try:
            validation = scan(job.data.validation.path, job.data.validation.columns)
            validation_digest = _transform_digest(job.data.validation)
            validation_plan(job, validation, validation_digest)
        except DataError as error:
            raise JobError([f"data.validation: {error}"]) from error
    return Data(manifest, digest, validation, validation_digest, plan)


def _transform_digest(dataset: DatasetSpec) -> str:
    return transform_digest(load_transform(dataset.transform)) if dataset.transform else ""
