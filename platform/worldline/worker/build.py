"""From a setup to a worker that is ready to be admitted: the one place where its parts are put together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from worldline.collective.forming import connect_ahead, form_gloo
from worldline.collective.group import CollectiveFailed, Group
from worldline.collective.nccl import form_nccl
from worldline.data.block import Block
from worldline.data.feeder import FeederSource
from worldline.data.loader import Loader, micro_batch
from worldline.data.manifest import Manifest
from worldline.data.plan import Plan
from worldline.data.reader import LocalSource, WindowReader
from worldline.data.transform import load_transform
from worldline.job.fingerprint import make_deterministic, numeric_fingerprint
from worldline.job.load import extend_path, load_task
from worldline.job.spec import DatasetSpec, Job
from worldline.storage import open_storage
from worldline.worker.builders import build_training
from worldline.worker.engine import Engine
from worldline.worker.evaluate import Evaluator
from worldline.worker.mailbox import Mailbox
from worldline.worker.meetings import FormGroup
from worldline.worker.member import EngineSettings
from worldline.worker.orders import Meeting, Setup
from worldline.worker.plans import training_plan, validation_plan
from worldline.worker.rehearsal import rehearse
from worldline.worker.rng import seed_all
from worldline.worker.runner import Runner, Schedule
from worldline.worker.state import TrainState

FORM_TIMEOUT_S = 30.0


class Built:
    """A standby's parts."""

    def __init__(self, runner: Runner, plan: Plan, numeric_fingerprint: dict[str, str]) -> None:
        self.runner = runner
        self.plan = plan
        self.numeric_fingerprint = numeric_fingerprint


def build(setup: Setup, mailbox: Mailbox, address: str) -> Built:
    """Build task, model, optimizer, data and runner. address: this node's, as peers reach it.

    Everything random in building a model is drawn from the job's seed, so that all workers build the same.
    """
    job = Job.model_validate(setup.job)
    search = [Path(folder) for folder in setup.search]
    extend_path(search)
    device = torch.device("cuda", 0) if job.world.gpus_per_worker else torch.device("cpu")
    make_deterministic(job.world.threads)
    seed_all(job.seed)
    task = load_task(job.task, search)
    model, optimizer, scheduler = build_training(task, device, search)
    plan = training_plan(job, Manifest.from_json(setup.manifest), setup.transform_digest)
    loader, first = _loader(job, job.data.train, plan, setup.feeder, setup.last_step)
    engine = Engine(
        task,
        model,
        optimizer,
        scheduler,
        plan,
        loader,
        EngineSettings(
            num_shards=job.batch.logical_shards,
            seed=job.seed,
            clip_norm=job.gradient.clip_norm,
            skip_nonfinite=job.gradient.nonfinite == "skip",
            bf16=job.precision == "bf16",
            bitwise=job.mode == "bitwise",
        ),
        device,
    )
    state = TrainState(model, optimizer, scheduler)
    rehearse(engine, state, micro_batch(first.columns, first.row_ids, 0, job.batch.rows_per_shard))
    # After the task's own code has run: what that sets in torch is part of the numbers.
    numeric = numeric_fingerprint(job.precision, job.mode, str(device))
    schedule = Schedule(
        last_step=setup.last_step,
        digest_every=job.digest_every_steps,
        checkpoint_every=job.checkpoint.every_steps,
        evaluate_every=job.evaluate.every_steps if job.evaluate else None,
        attempt=setup.attempt,
        fingerprints={
            "plan fingerprint": plan.fingerprint,
            "numeric fingerprint": hashlib.sha256(json.dumps(numeric, sort_keys=True).encode()).hexdigest(),
        },
    )
    runner = Runner(
        engine,
        loader,
        _evaluator(job, setup, task, model, device),
        state,
        open_storage(setup.storage),
        schedule,
        rendezvous(setup.store_host, setup.store_port, address, device, job.failure.timeout_s),
        mailbox,
    )
    return Built(runner, plan, numeric)


def rendezvous(host: str, port: int, address: str, device: torch.device, timeout_s: float) -> FormGroup:
    """Groups that meet in the TCP store at host:port."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=timedelta(seconds=FORM_TIMEOUT_S)
    )

    connect_ahead(store)

    def form(meeting: Meeting, cancelled: Callable[[], bool]) -> Group | None:
        if meeting.size == 1:
            return None
        if meeting.number and device.type == "cuda":
            raise CollectiveFailed("connecting while another generation trains is not tried on GPUs yet")
        form_group = form_nccl if device.type == "cuda" else form_gloo
        return form_group(
            store,
            prefix=meeting.prefix,
            rank=meeting.rank,
            size=meeting.size,
            address=address,
            form_timeout_s=min(FORM_TIMEOUT_S, timeout_s),
            timeout_s=timeout_s,
            cancelled=cancelled,
        )

    return form


def _evaluator(
    job: Job, setup: Setup, task: object, model: torch.nn.Module, device: torch.device
) -> Evaluator | None:
    from worldline.task import Task

    if job.evaluate is None or job.data.validation is None or setup.validation_manifest is None:
        return None
    assert isinstance(task, Task)
    plan = validation_plan(
        job, Manifest.from_json(setup.validation_manifest), setup.validation_transform_digest
    )
    loader, _ = _loader(job, job.data.validation, plan, None, plan.steps_per_epoch)
    return Evaluator(task, model, plan, loader, job.seed, device)


def _loader(
    job: Job, dataset: DatasetSpec, plan: Plan, feeder: object, last_step: int
) -> tuple[Loader, Block]:
    """The loader, and the plan's first window."""
    transform = load_transform(dataset.transform) if dataset.transform else None
    reader = WindowReader(plan.manifest, dataset.columns, transform)
    # The first read imports and opens much: not while the others wait for this worker's first step.
    first = reader.read(plan.window(0, 0, 0))
    source = LocalSource(reader, plan) if feeder is None else FeederSource(feeder, reader, plan)
    return Loader(plan, source, job.batch.rows_per_shard, last_step=last_step), first
