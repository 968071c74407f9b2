"""The Ray actor that hosts a worker: orders in, reports out, one training thread between them."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from worldline.events import StepRecord
from worldline.health.condition import Condition
from worldline.worker.family import Family
from worldline.worker.lifeline import Anchor, Lifeline, end_process
from worldline.worker.mailbox import Mailbox
from worldline.worker.notice import Notices
from worldline.worker.orders import (
    GenerationEnd,
    GenerationOrder,
    Hello,
    Invitation,
    Notice,
    Reports,
    Setup,
)

if TYPE_CHECKING:
    from worldline.worker.build import Built

TRAIN, ORDERS, REPORTS, HEALTH = "train", "orders", "reports", "health"
CONCURRENCY_GROUPS = {TRAIN: 1, ORDERS: 2, REPORTS: 1, HEALTH: 1}


class Worker:
    """Becomes a Ray actor in the controller's `cluster`.

    Protocol: `prepare` once; then this is a standby. `train(order)` lasts as long as the generation does for
    this worker and returns how it ended; as it is always pending, it also tells the controller at once when
    the process dies. `meet`, `halt`, `abandon`, `fetch` and the others answer meanwhile, in other threads.
    Each generation's number fences it: an order of an old generation changes nothing in a newer one.
    SIGTERM is told as a report; the process and all that it has started end together.
    """

    def __init__(self, id: str, anchor: Anchor) -> None:
        """Raises ConnectionError where the controller cannot be reached from here."""
        import ray

        # Before anything of the job's runs, as that may start processes.
        self._family = Family.if_possible()
        self._node: str = ray.get_runtime_context().get_node_id()
        self._address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._lifeline = Lifeline.hold(anchor, id, self._node, self._address, end_process)
        self._mailbox = Mailbox()
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._built: Built | None = None
        # A thread of our own: torch keeps its number of threads by thread, and Ray gives none for long.
        threading.Thread(target=self._serve, name="training", daemon=True).start()
        self._notices = Notices(self._tell)  # in the main thread, where Ray makes actors

    def prepare(self, setup: Setup) -> Hello:
        """Import, build and check everything. Raises what the job's code raises."""

        def build() -> Built:
            from worldline.worker.build import build

            return build(setup, self._mailbox, self._address)

        self._built = self._in_training_thread(build)
        # All that was imported and built stays. A full collection, which Ray may order, too, would go through
        # it at any time, and hold up a step by 0.1 s or more.
        gc.collect()
        gc.freeze()
        built = self._built
        return Hello(
            pid=os.getpid(),
            node=self._node,
            ip=self._address,
            numeric_fingerprint=built.numeric_fingerprint,
        )

    def train(self, order: GenerationOrder) -> GenerationEnd:
        runner = self._ready().runner
        end: GenerationEnd = self._in_training_thread(lambda: runner.run(order))
        return end

    def meet(self, invitation: Invitation) -> None:
        self._ready().runner.meet(invitation)

    def halt(self, generation: int) -> None:
        self._ready().runner.halt(generation)

    def abandon(self, generation: int) -> None:
        self._ready().runner.abandon(generation)

    def write_checkpoint(self, generation: int, part: int, parts: int) -> None:
        """While no generation trains; the result comes with the reports."""
        runner = self._ready().runner
        self._in_training_thread(lambda: runner.write_checkpoint(generation, part, parts))

    def fetch(self, wait_s: float) -> Reports:
        """What was posted since the last call; waits for it up to `wait_s` seconds."""
        items = self._mailbox.fetch(wait_s)
        runner = self._ready().runner
        return Reports(items, runner.position, runner.phase)

    def steps_after(self, step: int) -> tuple[StepRecord, ...]:
        return self._mailbox.steps_after(step)

    def condition(self, generation: int) -> Condition:
        """What the training thread does in this generation, even if it is stuck."""
        return self._ready().runner.condition(generation)

    def harm(self, number: int, resume_s: float | None) -> None:
        """Send this process the signal that a fault script asks for, wherever it runs. resume_s: a process
        that is stopped goes on after so many seconds; it cannot do that itself.
        """
        if resume_s is not None:
            subprocess.Popen(["sh", "-c", f"sleep {resume_s:g}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), number)

    def _tell(self, notice: Notice) -> bool:
        """Only who is ready has something to lose, and is listened to."""
        self._mailbox.post(notice)
        return self._built is not None

    def _ready(self) -> Built:
        if self._built is None:
            raise RuntimeError("prepare() has not finished")
        return self._built

    def _in_training_thread(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._orders.put((call, future))
        return future.result()

    def _serve(self) -> None:
        while True:
            call, future = self._orders.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
