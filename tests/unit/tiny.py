"""A training so small that a step takes milliseconds, with everything in it that could tell worlds apart.

Built in the processes of `ranks`; what a test wants otherwise it says in `Case`. Faults strike at numbered
points of one step: before each loss, inside each backward, and at every operation of the group.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.unit import ranks
from torch import nn

from worldline.checkpoint.manifest import CheckpointManifest
from worldline.checkpoint.save import commit
from worldline.collective.buckets import make_buckets
from worldline.data.block import Block
from worldline.data.loader import Loader
from worldline.data.manifest import FileEntry, Manifest
from worldline.data.plan import Plan, WindowKey
from worldline.events import StepRecord
from worldline.health.condition import Condition
from worldline.storage import open_storage
from worldline.task import Loss, Peers, Task
from worldline.worker import engine as engine_module
from worldline.worker.engine import Completed, Engine
from worldline.worker.evaluate import Evaluator
from worldline.worker.mailbox import Mailbox
from worldline.worker.member import EngineSettings, Membership
from worldline.worker.orders import (
    CheckpointPart,
    EndKind,
    GenerationEnd,
    GenerationOrder,
    Invitation,
    Meeting,
    Met,
)
from worldline.worker.rng import seed_all
from worldline.worker.runner import Runner, Schedule
from worldline.worker.state import TrainState, digest
from worldline.world import Position, ShardRange, assign

SHARDS = 8
MICRO_ROWS = 2


@dataclass(frozen=True)
class Case:
    """rows: of the data set; an epoch's last step is short. rows_per_shard: two micro-batches."""

    rows: int = 8 * 6 + 3
    rows_per_shard: int = 4
    loss: str = "mean"  # mean | weighted: Loss with metrics of other names on every shard
    clip: float | None = 0.5
    bf16: bool = False
    bitwise: bool = True
    skip_nonfinite: bool = False
    nan_row: int = -1
    last_step: int = 5
    digest_every: int = 1
    evaluate_every: int | None = None
    storage: str = ""
    fingerprint: str = "a"
    watched: bool = True
    """Whether operations of the group are points where a fault may strike."""
    after: Callable[[SimpleNamespace, int, Peers], None] | None = None
    """What the task does after a step, with its worker's room."""


# What is trained


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.randn(4))  # in some steps no shard needs it, in others one does
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight = self.hidden.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen | True  # puts another tensor in its place
        features = self.drop(self.norm(self.conv(x))).mean(2)
        self.mean = 0.9 * self.mean + 0.1 * features.detach().float().mean(0)
        out = self.out(self.hidden(features).tanh())
        return out * self.rare if rare else out


class Tiny(Task):
    def __init__(self, case: Case, point: Callable[[str], None]) -> None:
        self.case = case
        self.point = point

    def build_model(self) -> nn.Module:
        return Net()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor | Loss:
        self.point("loss")
        ids = batch["id"].tolist()
        out = model(batch["x"], rare=any(row % 16 == 0 for row in ids))
        if out.requires_grad:
            out.register_hook(lambda _: self.point("backward"))
        if self.case.nan_row in ids:
            out = out * float("nan")
        each = (out.float() - batch["y"]).square().mean(1)
        if self.case.loss == "mean":
            return each.mean()
        weight = batch["y"].abs().ceil().mean(1)
        metrics = {"first" if row % 3 else "other": float(row) for row in ids[:1]} if ids[0] % 5 else {}
        return Loss((each * weight).sum(), weight.sum(), metrics)

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"error": (model(batch["x"], rare=True) - batch["y"]).abs().mean()}


class Looking(Tiny):
    """Also looks at every step that is completed."""

    room: SimpleNamespace

    def after_step(self, step: int, peers: Peers) -> None:
        assert self.case.after is not None
        self.case.after(self.room, step, peers)


def columns(ids: np.ndarray) -> dict[str, Any]:
    def numbers(salt: int, shape: tuple[int, ...]) -> np.ndarray:
        draw = [np.random.Generator(np.random.PCG64([row, salt])).normal(size=shape) for row in ids]
        return np.stack(draw).astype(np.float32)

    return {"id": ids, "x": numbers(0, (1, 9)), "y": numbers(1, (4,))}


class Rows:
    """Makes each window from the ids of its rows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def fetch(self, key: WindowKey, timeout_s: float) -> Block:
        ids = self.plan.window(*key).row_ids
        return Block(columns(ids), ids)


def plan_of(rows: int, rows_per_shard: int, **more: Any) -> Plan:
    manifest = Manifest((FileEntry("part.parquet", 1, (rows // 2, rows - rows // 2), ""),), (), "/data")
    return Plan(manifest, seed=7, num_shards=SHARDS, rows_per_shard=rows_per_shard, window_rows=5, **more)


# A worker, in its process


def build(room: SimpleNamespace, case: Case, generation_prefix: str = "") -> None:
    """Task, model, engine and runner of a worker, as `worker.build` puts them together."""
    close(room)
    room.case, room.prefix = case, generation_prefix
    room.strike, room.strike_step, room.points = None, 0, 0
    room.losses = Counter()
    room.freed = threading.Event()
    seed_all(1)
    kind_of_task = Looking if case.after else Tiny
    task = room.task = kind_of_task(case, lambda kind: _point(room, kind))
    task.room = room
    model = room.model = task.build_model()
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer)
    plan = room.plan = plan_of(case.rows, case.rows_per_shard)
    room.loaders = [Loader(plan, Rows(plan), MICRO_ROWS)]
    # So small that the model takes several.
    engine_module.gradient_buckets = lambda model: make_buckets(
        reversed([p for p in model.parameters() if p.requires_grad]), bucket_bytes=60
    )
    room.engine = Engine(
        task,
        model,
        optimizer,
        scheduler,
        plan,
        room.loaders[0],
        EngineSettings(SHARDS, 3, case.clip, case.skip_nonfinite, case.bf16, case.bitwise),
        torch.device("cpu"),
    )
    room.state = TrainState(model, optimizer, scheduler)
    if not case.storage:
        return
    evaluator = None
    if case.evaluate_every:
        validation = plan_of(11, MICRO_ROWS, shuffle=False, allow_short=True)
        room.loaders.append(Loader(validation, Rows(validation), MICRO_ROWS))
        evaluator = Evaluator(task, model, validation, room.loaders[1], 3, torch.device("cpu"))
    schedule = Schedule(
        last_step=case.last_step,
        digest_every=case.digest_every,
        checkpoint_every=1000,
        evaluate_every=case.evaluate_every,
        attempt=1,
        fingerprints={"plan fingerprint": plan.fingerprint, "numeric fingerprint": case.fingerprint},
    )
    room.mailbox = Mailbox()
    storage = open_storage(case.storage)
    room.runner = Runner(
        room.engine,
        room.loaders[0],
        evaluator,
        room.state,
        storage,
        schedule,
        lambda *a: _form(room, *a),
        room.mailbox,
    )


def close(room: SimpleNamespace) -> None:
    for loader in getattr(room, "loaders", ()):
        loader.close()
    if hasattr(room, "runner"):
        room.runner.close(ranks.DEADLINE_S)


def state_digest(room: SimpleNamespace) -> str:
    return digest(room.state.tensors(), room.state.meta())


class Watched:
    """A group whose every operation, but that of leaving it, is a point where a fault may strike."""

    def __init__(self, group: Any, point: Callable[[str], None]) -> None:
        self._group, self._point = group, point
        self.rank, self.size, self.device, self.log = group.rank, group.size, group.device, group.log
        self.unfinished = group.unfinished

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if name != "abandon":
                self._point(name)
            return getattr(self._group, name)(*args, **options)

        return call


def _form(room: SimpleNamespace, meeting: Meeting, cancelled: Callable[[], bool]) -> Any:
    prefix = f"{room.prefix}/{meeting.prefix}"
    group = ranks.form(room, meeting.rank, meeting.size, prefix, cancelled=cancelled)
    watched = room.case.watched and group is not None
    return Watched(group, lambda kind: _point(room, kind)) if watched else group


# Faults


def arm(room: SimpleNamespace, strike: str, step: int, number: int) -> None:
    """Have `strike` happen at point `number` (from 0) of computing `step`."""
    room.strike, room.strike_step, room.strike_at, room.points = strike, step, number, 0


def count_points(room: SimpleNamespace) -> int:
    return room.points


def count_losses(room: SimpleNamespace) -> dict[int, int]:
    """How often the task's loss was called for each step."""
    return dict(room.losses)


def _point(room: SimpleNamespace, kind: str) -> None:
    room.losses[room.engine.completed + 1] += kind == "loss"
    if not room.strike or room.engine.completed + 1 != room.strike_step:
        return
    here = room.points == room.strike_at
    room.points += 1
    if not here:
        return
    strike, room.strike = room.strike, None
    if strike == "kill":
        ranks.kill_self()
    elif strike == "stop":
        ranks.stop_self()
    elif strike == "abandon":
        room.runner.abandon(room.generation)
    elif strike == "halt":
        room.runner.halt(room.generation)
    elif strike == "memory":
        raise MemoryError("no memory left")
    elif strike == "error":
        raise ValueError("the task is wrong")
    elif strike == "loop":
        loop(room)


def loop(room: SimpleNamespace) -> None:
    while not room.freed.is_set():
        pass


def free(room: SimpleNamespace) -> None:
    """End its loop."""
    room.freed.set()


# Steps by hand


def run_steps(
    room: SimpleNamespace, rank: int, size: int, prefix: str, case: Case, steps: int
) -> list[tuple[Any, ...]]:
    """Build afresh and complete `steps` steps with the engine alone, in one world."""
    build(room, case)
    return go_on(room, rank, size, prefix, steps)


def go_on(room: SimpleNamespace, rank: int, size: int, prefix: str, steps: int) -> list[tuple[Any, ...]]:
    """As `run_steps`, with what was built."""
    group = ranks.form(room, rank, size, prefix)
    room.engine.join(Membership(1, 1, rank, assign(SHARDS, size), group), lambda: False)
    return [essence(step(room).record) for _ in range(steps)]


def step(room: SimpleNamespace) -> Completed:
    return room.engine.step(halt=False, digest=lambda _: state_digest(room))


def essence(record: StepRecord) -> tuple[Any, ...]:
    """All of a record that may not depend on the world, its numbers exactly."""
    numbers = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm} | record.metrics
    return (
        record.step,
        record.epoch,
        record.rows,
        record.rows_digest,
        record.skipped,
        record.state_digest,
        {name: float(value).hex() for name, value in numbers.items()},
    )


def run_plain(room: SimpleNamespace, case: Case, steps: int) -> list[tuple[float, float]]:
    """The same steps as anybody would write them: (loss, gradient norm) of each."""
    build(room, case)
    task, model = room.task, room.model
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer)
    numbers = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        losses, weights = [], []
        for shard in range(SHARDS):
            for micro, batch in enumerate(room.loaders[0].batches(step, shard)):
                seed_all(3, step, shard, micro)
                loss = task.loss(model, batch.columns)
                if not isinstance(loss, Loss):
                    loss = Loss(loss * batch.num_rows, batch.num_rows)
                loss.sum.backward()
                losses.append(float(loss.sum))
                weights.append(float(loss.weight))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= sum(weights)
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))
        optimizer.step()
        scheduler.step()
        numbers.append((sum(losses) / sum(weights), float(norm)))
    return numbers


# Generations, as the controller orders them


class Line:
    """The controller's part, by hand: forms generations of `peers` and hears how they end."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.prefix = ranks.new_prefix()
        self.generation = 0
        self.position = Position(0)

    def build(self, peers: list[ranks.Peer]) -> None:
        for peer in peers:
            peer.call(build, self.case, self.prefix)

    def begin(
        self,
        members: list[ranks.Peer],
        sources: list[ranks.Peer] | None = None,
        ranges: tuple[ShardRange, ...] | None = None,
        **more: Any,
    ) -> None:
        """Start a generation at `self.position`, whose state `sources` (all, if None) hold."""
        self.generation += 1
        self.members = members
        holders = members if sources is None else sources
        order = GenerationOrder(
            generation=self.generation,
            rank=0,
            ranges=ranges or assign(SHARDS, len(members)),
            position=self.position,
            sources=tuple(rank for rank, peer in enumerate(members) if peer in holders),
            receivers=tuple(rank for rank, peer in enumerate(members) if peer not in holders),
            **more,
        )
        for rank, peer in enumerate(members):
            peer.start(run_order, replace(order, rank=rank))

    def ends(self) -> dict[ranks.Peer, GenerationEnd]:
        """How it ended for each member that lives; `position` becomes the highest of them."""
        ends = {}
        for peer in self.members:
            with contextlib.suppress(EOFError, ConnectionResetError):
                ends[peer] = peer.result()
        self.position = max((e.position for e in ends.values() if e.position), default=self.position)
        return ends

    def abandon(self, peers: list[ranks.Peer]) -> None:
        for peer in peers:
            peer.now(abandon, self.generation)

    def meet(self, members: list[ranks.Peer], number: int) -> None:
        """Have `members` connect for the next generation, whatever they do meanwhile."""
        for rank, peer in enumerate(members):
            meeting = Meeting(self.generation + 1, number, rank, len(members))
            peer.now(meet, Invitation(meeting, assign(SHARDS, len(members))[rank], 1))

    def run(self, members: list[ranks.Peer], *args: Any, **more: Any) -> dict[ranks.Peer, GenerationEnd]:
        self.begin(members, *args, **more)
        return self.ends()


def run_order(room: SimpleNamespace, order: GenerationOrder) -> GenerationEnd:
    room.generation = order.generation
    return room.runner.run(order)


def meet(room: SimpleNamespace, invitation: Invitation) -> None:
    room.runner.meet(invitation)


def met(room: SimpleNamespace, number: int) -> Met:
    """What came of a meeting that this worker was asked to."""
    deadline = time.monotonic() + ranks.DEADLINE_S
    while time.monotonic() < deadline:
        for report in room.mailbox.fetch(1.0):
            if isinstance(report, Met) and report.number == number:
                return report
    raise TimeoutError(f"nothing came of meeting {number}")


def abandon(room: SimpleNamespace, generation: int) -> None:
    room.runner.abandon(generation)


def condition(room: SimpleNamespace, generation: int) -> Condition:
    return room.runner.condition(generation)


def halt(room: SimpleNamespace, generation: int) -> None:
    room.runner.halt(generation)


def told(room: SimpleNamespace) -> list[tuple[Any, ...]]:
    """The records of all steps that this worker completed and kept."""
    return [essence(record) for record in room.mailbox.steps_after(0)]


def reports(room: SimpleNamespace) -> list[Any]:
    return list(room.mailbox.fetch(0))


def kinds(ends: dict[ranks.Peer, GenerationEnd]) -> list[EndKind]:
    return [end.kind for end in ends.values()]


# Checkpoints, by hand


def write_checkpoint(room: SimpleNamespace, generation: int, part: int, parts: int) -> None:
    room.mailbox.fetch(0)
    room.runner.write_checkpoint(generation, part, parts)


def written_part(room: SimpleNamespace) -> CheckpointPart:
    while True:
        for item in room.mailbox.fetch(30):
            if isinstance(item, CheckpointPart):
                return item


def commit_parts(storage: str, parts: list[CheckpointPart]) -> None:
    commit(
        open_storage(storage),
        CheckpointManifest(
            step=parts[0].position.step,
            evaluated=parts[0].position.evaluated,
            attempt=1,
            generation=parts[0].generation,
            state_digest=parts[0].state_digest,
            plan_fingerprint="",
            numeric_fingerprint={},
            job_digest="",
            meta=parts[0].meta,
            files={part.part.file: part.part.entry for part in parts},
            tensors={name: entry for part in parts for name, entry in part.part.tensors.items()},
        ),
    )
