"""A cluster of scripted workers for the controller: no Ray, no threads of training, no real time.

Time passes, and workers compute, only while the controller waits for a signal.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import torch

from worldline.checkpoint.manifest import directory, part_name
from worldline.checkpoint.part import write_part
from worldline.control.budget import Budget
from worldline.control.controller import Controller, Parts
from worldline.control.decisions import Limits
from worldline.control.intake import Intake
from worldline.control.journal import Journal
from worldline.control.line import Line
from worldline.control.membership import START
from worldline.control.reference import Reference
from worldline.control.restore import restore_point
from worldline.control.saves import Saves
from worldline.control.signals import (
    Cut,
    Described,
    Ended,
    Fetched,
    Lost,
    Ready,
    Signals,
    Silent,
    StartFailed,
    StepsFetched,
)
from worldline.events import EvaluationRecord, EventKind, StepRecord
from worldline.storage import open_storage
from worldline.tracking.log import (
    EVALUATIONS,
    EVENTS,
    STEPS,
    EvaluationLog,
    EventLog,
    StepLog,
    read_evaluations,
    read_events,
    read_steps,
)
from worldline.tracking.status import RunState, Status, StatusWriter
from worldline.worker.orders import (
    CheckpointPart,
    EndKind,
    GenerationEnd,
    GenerationFormed,
    Hello,
    Met,
    Reports,
    StateDigest,
)
from worldline.world import Position

TICK_S = 0.02
STEP_S = 0.3
START_S = 1.0
SILENT_S = 3.0


def record(step, generation=1, world=1):
    return StepRecord(
        step=step,
        epoch=0,
        loss=1.0 / step,
        lr=0.1,
        grad_norm=1.0,
        rows=8,
        world=world,
        generation=generation,
        attempt=1,
        step_s=STEP_S,
        data_s=0.0,
        compute_s=STEP_S,
        reduce_s=0.0,
        state_digest=None,
        rows_digest="",
        time=0.0,
    )


@dataclass
class Worker:
    """A worker's process. ready_at: None once it is prepared. order: while a generation trains."""

    id: str
    ready_at: float | None
    position: Position | None = START
    order: object = None
    formed: bool = False
    narrates: bool = False
    halted: int = 0
    frozen: bool = False
    frozen_at: float | None = None
    condition: object = None
    taint: str = ""
    """What makes this worker's state differ."""
    outbox: list = field(default_factory=list)
    polls: list = field(default_factory=list)
    """Until when each poll under way waits for something to tell."""
    records: dict = field(default_factory=dict)


class Cluster:
    """What `control.cluster.Cluster` offers, and the workers behind it.

    script: step -> what happens just before a world completes that step; what it returns, unless it is None,
    means that the step does not come about. at_time: (time, what happens then). starts: id -> the text of an
    exception that its preparation raises, or the numeric fingerprint that it has.
    """

    def __init__(self, storage, signals, clock, last_step, checkpoint_every, evaluate_every, step_s):
        self.storage = storage
        self.signals = signals
        self.clock = clock
        self.last_step = last_step
        self.checkpoint_every = checkpoint_every
        self.evaluate_every = evaluate_every
        self.step_s = step_s
        self.next_step = 0.0
        self.workers = {}
        self.count = 0
        self.script = {}
        self.at_time = []
        self.starts = {}
        self.fail_writes = ""
        self.write_hook = lambda id: None
        self.orders = []
        self.invitations = []
        self.no_meeting = ""
        self.absent = set()
        self.killed = []

    # As the controller sees it

    def request(self, avoid=()):
        self.count += 1
        id = f"w{self.count}"
        self.workers[id] = Worker(id, self.clock() + START_S)
        return id

    def train(self, id, order):
        self.orders.append((id, order))
        worker = self.workers.get(id)
        if worker is not None:
            worker.order, worker.formed, worker.narrates = order, False, order.rank == 0

    def meet(self, id, invitation):
        meeting = invitation.meeting
        self.invitations.append((id, invitation))
        if id in self.workers and id not in self.absent:
            self.workers[id].outbox.append(Met(meeting.generation, meeting.number, self.no_meeting))

    def halt(self, id, generation):
        if id in self.workers:
            self.workers[id].halted = generation

    def abandon(self, id, generation):
        worker = self.workers.get(id)
        if worker is not None and worker.order is not None and not worker.frozen:
            self.end(worker, EndKind.BROKEN, "abandoned on order")

    def write_checkpoint(self, id, generation, part, parts):
        worker = self.workers.get(id)
        if worker is not None and not worker.frozen:
            self.write_part(worker, generation, part, parts)

    def fetch(self, id, wait_s):
        worker = self.workers.get(id)
        if worker is None:
            self.signals.post(Lost(id, "is gone"))
        elif not worker.frozen:
            worker.polls.append(self.clock() + wait_s)
            self.answer(worker)

    def inquire(self, id, generation):
        worker = self.workers.get(id)
        if worker is not None and not worker.frozen:
            self.signals.post(Described(id, generation, worker.condition))

    def steps_after(self, id, step):
        worker = self.workers.get(id)
        records = None if worker is None else tuple(r for s, r in worker.records.items() if s > step)
        self.signals.post(StepsFetched(id, records))

    def kill(self, id):
        self.killed.append(id)
        self.workers.pop(id, None)

    def bury(self, id):
        self.workers.pop(id, None)

    def dismiss(self, id):
        self.workers.pop(id, None)

    def dismiss_all(self):
        self.workers.clear()

    # As things happen

    def die(self, id):
        self.workers.pop(id)
        self.signals.post(Cut(id))

    def tick(self):
        """Time has passed."""
        for worker in list(self.workers.values()):
            if worker.ready_at is not None and self.clock() >= worker.ready_at:
                self.prepare(worker)
        for item in [item for item in self.at_time if item[0] <= self.clock()]:
            self.at_time.remove(item)
            item[1]()
        for worker in self.workers.values():
            self.feel_pulse(worker)
            self.answer(worker)
        training = [w for w in self.workers.values() if w.order is not None]
        if not training:
            return
        order = training[0].order
        whole = len(training) == len(order.ranges) and not any(w.frozen for w in training)
        if not whole:
            if len(training) < len(order.ranges):
                for worker in training:
                    if not worker.frozen:
                        self.end(worker, EndKind.BROKEN, "a peer is gone")
            return
        if not all(w.formed for w in training):
            self.form(training)
            self.next_step = self.clock() + self.step_s
        elif self.clock() >= self.next_step:
            self.next_step = self.clock() + self.step_s
            self.step(training)

    def answer(self, worker):
        """The polls of a worker that has something to say, or whose time is over."""
        while worker.polls and not worker.frozen and (worker.outbox or self.clock() >= worker.polls[0]):
            worker.polls.pop(0)
            items, worker.outbox = tuple(worker.outbox), []
            self.signals.post(Fetched(worker.id, Reports(items, worker.position, "compute")))

    def feel_pulse(self, worker):
        if worker.frozen and worker.frozen_at is None:
            worker.frozen_at = self.clock()
        if worker.frozen and self.clock() >= worker.frozen_at + SILENT_S:
            worker.frozen_at = math.inf
            self.signals.post(Silent(worker.id, SILENT_S))

    def prepare(self, worker):
        worker.ready_at = None
        start = self.starts.get(worker.id, {"torch": "2"})
        if isinstance(start, str):
            self.signals.post(StartFailed(worker.id, start))
        else:
            self.signals.post(Ready(worker.id, Hello(1, "node", "10.0.0.1", start)))

    def form(self, training):
        for worker in training:
            order = worker.order
            if order.rank in order.sources and order.restore is None:
                assert worker.position == order.position, f"{worker.id} is no source"
            elif order.restore is not None:
                assert f"{order.restore}/manifest.json" in self.storage.list("checkpoints/")
            worker.position, worker.formed = order.position, True
            if order.rank == 0:
                worker.outbox.append(GenerationFormed(order.generation, 0.0, 0.0))
            if order.checkpoint:
                self.write_part(worker, order.generation, order.rank, len(order.ranges))

    def step(self, training):
        step = training[0].position.step + 1
        if step > self.last_step:
            for worker in training:
                self.end(worker, EndKind.FINISHED)
            return
        happens = self.script.pop(step, None)
        if happens is not None and happens() is not None:
            return
        training = [w for w in training if w.id in self.workers and w.order is not None]
        if len(training) == len(training[0].order.ranges if training else ()):
            halt = any(w.halted >= w.order.generation for w in training)
            for worker in training:
                self.complete(worker, step)
            for worker in training:
                if step == self.last_step:
                    self.end(worker, EndKind.FINISHED)
                elif halt:
                    self.end(worker, EndKind.HALTED)

    def complete(self, worker, step):
        """This worker's update of the step is done."""
        order = worker.order
        worker.position = Position(step)
        worker.records[step] = record(step, order.generation, len(order.ranges))
        if worker.narrates:
            worker.outbox.append(worker.records[step])
        if step % self.checkpoint_every == 0 or step == self.last_step:
            worker.outbox.append(StateDigest(order.generation, step, self.digest(worker)))
            self.write_part(worker, order.generation, order.rank, len(order.ranges))
        if self.evaluate_every and (step % self.evaluate_every == 0 or step == self.last_step):
            worker.position = Position(step, evaluated=True)
            worker.outbox.append(EvaluationRecord(step, 8, {"loss": 1.0}, 0.1, order.generation, 1))

    def end(self, worker, kind, reason="", traceback="", torn=False):
        generation, worker.order = worker.order.generation, None
        if torn:
            worker.position = None
        self.signals.post(
            Ended(worker.id, GenerationEnd(kind, generation, worker.position, reason, traceback))
        )

    def digest(self, worker):
        return f"{worker.position.step:064d}" if not worker.taint else worker.taint * 64

    def write_part(self, worker, generation, part, parts):
        info = None
        if not self.fail_writes:
            name = part_name(1, generation, part)
            state = {f"p{part}": torch.tensor([worker.position.step])}
            info = write_part(self.storage, directory(worker.position.step), name, state)
        worker.outbox.append(
            CheckpointPart(
                generation, part, parts, worker.position, self.digest(worker), {}, info, self.fail_writes
            )
        )
        self.write_hook(worker.id)


class FakeSignals(Signals):
    """The queue; waiting for it lets time pass."""

    def __init__(self, pass_time):
        self._waiting = deque()
        self._pass_time = pass_time

    def post(self, signal):
        self._waiting.append(signal)

    def next(self, timeout_s):
        if not self._waiting and timeout_s > 0:
            self._pass_time(min(timeout_s, TICK_S))
        return self._waiting.popleft() if self._waiting else None


class SilentConsole:
    def __init__(self):
        self.events = []

    def update(self, status, lr=None):
        pass

    def event(self, event):
        self.events.append(event)

    def close(self, summary):
        pass


def status(name="run", last_step=20):
    return Status(
        run=name,
        state=RunState.STARTING,
        reason="",
        step=0,
        steps=last_step,
        epoch=0,
        attempt=1,
        generation=0,
        world=0,
        min=1,
        max=2,
        workers=(),
        standbys=0,
        loss=None,
        rows_per_s=None,
        goodput=None,
        incidents=0,
        mlflow_run_id=None,
        storage="",
    )


class Attempt:
    """The real controller with its real logs and saves, over a fake cluster, on a clock of its own."""

    def __init__(
        self,
        folder,
        *,
        last_step=20,
        checkpoint_every=100,
        evaluate_every=None,
        task_errors=3,
        no_progress=3,
        step_s=STEP_S,
        **limits,
    ):
        self.folder = folder
        self.now = 0.0
        self.longest_s = 5000.0
        self.storage = open_storage(str(folder))
        self.signals = FakeSignals(self.pass_time)
        self.cluster = Cluster(
            self.storage,
            self.signals,
            lambda: self.now,
            last_step,
            checkpoint_every,
            evaluate_every,
            step_s,
        )
        self.steps, self.evaluations = StepLog(folder / STEPS), EvaluationLog(folder / EVALUATIONS)
        self.event_log = EventLog(folder / EVENTS)
        self.console = SilentConsole()
        self.journal = Journal(
            status(last_step=last_step), self.event_log, StatusWriter(folder), self.console
        )
        self.may_write = True
        self.reference = Reference(None, strict=True)
        self.line = Line(self.steps)
        self.saves = Saves(
            self.storage,
            every_steps=checkpoint_every,
            keep=3,
            job_digest="job",
            plan_fingerprint="plan",
            numeric_fingerprint=self.reference.fingerprint,
            attempt=1,
            post=self.signals.post,
            before_commit=self.steps.sync,
            may_write=lambda: self.may_write,
            warn=lambda text: None,
        )
        self.restores = []
        self.answers = []
        self.forgotten = []
        defaults = {"min": 1, "max": 2, "standby": 0, "num_shards": 8, "start_s": 60, "timeout_s": 30}
        self.parts = Parts(
            cluster=self.cluster,
            signals=self.signals,
            line=self.line,
            saves=self.saves,
            intake=Intake(self.cluster, self.line, self.saves, self.evaluations, self.journal),
            journal=self.journal,
            limits=replace(Limits(**defaults), **limits),
            restore=self.restore,
            refuse=self.reference.refuse,
            budget=Budget(task_errors, no_progress),
            forget_before=self.forgotten.append,
            clock=lambda: self.now,
        )

    def ask(self, request):
        """Something that an operator asks; request(answer) -> signal."""
        self.signals.post(request(lambda accepted, sentence: self.answers.append((accepted, sentence))))

    def pass_time(self, seconds):
        self.saves.settle(10)  # commits run in a thread of real time
        self.now += seconds
        assert self.now < self.longest_s, "the run does not end"
        self.cluster.tick()

    def restore(self):
        point = restore_point(self.storage, lambda text: None)
        self.restores.append(point.position.step)
        return point

    def run(self):
        try:
            self.conclusion = Controller(self.parts).run()
        finally:
            self.saves.close(10)
            for log in (self.steps, self.evaluations, self.event_log):
                log.close()
            self.journal.close(RunState.STOPPED, "", "")
        return self.conclusion

    # What came out

    @property
    def told(self):
        return [r["step"] for r in read_steps(self.folder / STEPS)]

    @property
    def evaluated(self):
        return [r["step"] for r in read_evaluations(self.folder / EVALUATIONS)]

    @property
    def events(self):
        return read_events(self.folder / EVENTS)

    def reasons(self, kind: EventKind):
        return [event.reason for event in self.events if event.kind is kind]

    @property
    def worlds(self):
        """The sizes of the generations that trained."""
        return [event.world_after for event in self.events if event.kind is EventKind.GENERATION_FORMED]

    @property
    def saved(self):
        """The step a next attempt would go on from."""
        return restore_point(self.storage, lambda text: None).position.step
