"""The only file that asks Ray for actors: requests workers, carries orders, turns answers into signals."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayTaskError

from worldline.control.causes import CauseKind, loss_cause
from worldline.control.interrupts import handlers_kept
from worldline.control.lifelines import Lifelines
from worldline.control.signals import (
    Arrived,
    Cut,
    Described,
    Ended,
    Fetched,
    Lost,
    Post,
    Ready,
    Signal,
    StartFailed,
    StepsFetched,
    Unavailable,
)
from worldline.worker.actor import CONCURRENCY_GROUPS, HEALTH, ORDERS, REPORTS, TRAIN, Worker
from worldline.worker.orders import GenerationOrder, Hello, Invitation, Setup

NODE_LABEL = "ray.io/node-id"


def connect(cpus: float, notify: Callable[[str], None]) -> None:
    """Use the Ray that this process is connected to; else join the cluster that RAY_ADDRESS names, or start
    one in this process with `cpus` logical CPUs.
    """
    # Private: each death of a worker would be told by Ray, too, in a paragraph.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    with _without_rays_handlers():
        if address:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        else:
            _start_local(cpus, notify)


@contextlib.contextmanager
def _without_rays_handlers() -> Iterator[None]:
    """Ray's start would take SIGTERM for itself, in Python (by a private function) and once more in C++."""
    utils = ray._private.utils
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda *_: None
    try:
        with handlers_kept():
            yield
    finally:
        utils.set_sigterm_handler = theirs


def _start_local(cpus: float, notify: Callable[[str], None]) -> None:
    # Its own cluster ends with this process; a token left in the home folder must not lock it.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    num_cpus = math.ceil(cpus)
    cores = os.cpu_count() or 1
    if num_cpus > cores:
        notify(f"{num_cpus} logical CPUs on {cores} cores: the workers share them")
    # "local": without it Ray would join whatever cluster it finds on this machine.
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )


def node_address() -> str:
    """This node's address as the cluster knows it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class Cluster:
    """The run's worker actors, by id.

    Protocol: every call returns at once; what comes of it arrives as a signal. That a process is gone its
    lifeline tells (Cut), and Ray, with the cause, where it has one (Lost). Orders to a dead worker are
    dropped: its Cut is on the way.

    silent_s: how long a worker may give no sign of life before it is called Silent.
    """

    def __init__(
        self, setup: Setup, cpus: float, gpus: float, beat_s: float, silent_s: float, post: Post
    ) -> None:
        self._setup = ray.put(setup)
        self._post = post
        self._actors: dict[str, Any] = {}
        self._buried: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._lifelines = Lifelines(self._tell, beat_s, silent_s)
        self._anchor = self._lifelines.anchor(node_address())
        self._node = ray.get_runtime_context().get_node_id()
        self._count = 0
        as_actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)  # type: ignore[call-overload]
        self._actor_class: Any = as_actor(Worker)
        self._options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }

    def request(self, avoid: Collection[str] = ()) -> str:
        """Ask for one more worker, on another node than these; answers with Arrived, then Ready, StartFailed
        or Lost. Pending, it is the demand that an autoscaler sees."""
        self._count += 1
        id = f"w{self._count}"
        where = {"label_selector": {NODE_LABEL: f"!in({','.join(sorted(avoid))})"}} if avoid else {}
        actor = self._actor_class.options(**self._options, **where).remote(id, self._anchor)
        self._actors[id] = actor

        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is None:
                hello: Hello = answer.result()
                self._post(Ready(id, hello))
            elif isinstance(error, RayTaskError):
                self._post(StartFailed(id, _raised(error)))
            else:
                self._lost(id, error, "died while it was prepared")

        self._call(actor.prepare.options(concurrency_group=TRAIN), (self._setup,), done)
        return id

    def train(self, id: str, order: GenerationOrder) -> None:
        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is None:
                self._post(Ended(id, answer.result()))
            elif isinstance(error, RayTaskError):
                self._post(Lost(id, f"failed outside the job's code: {_raised(error)}"))
            else:
                self._lost(id, error, "is gone")

        self._order(id, "train", TRAIN, (order,), done)

    def meet(self, id: str, invitation: Invitation) -> None:
        self._order(id, "meet", ORDERS, (invitation,))

    def halt(self, id: str, generation: int) -> None:
        self._order(id, "halt", ORDERS, (generation,))

    def abandon(self, id: str, generation: int) -> None:
        self._order(id, "abandon", ORDERS, (generation,))

    def write_checkpoint(self, id: str, generation: int, part: int, parts: int) -> None:
        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if isinstance(error, RayTaskError):
                self._post(Lost(id, f"could not write its part of a checkpoint: {_raised(error)}"))
            elif error is not None:
                self._lost(id, error, "is gone")

        self._order(id, "write_checkpoint", ORDERS, (generation, part, parts), done)

    def fetch(self, id: str, wait_s: float) -> None:
        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is not None and loss_cause(error).gone:  # the only call that is pending on a standby
                self._lost(id, error, "is gone")
            else:
                self._post(Fetched(id, None if error else answer.result()))

        self._order(id, "fetch", REPORTS, (wait_s,), done)

    def inquire(self, id: str, generation: int) -> None:
        def done(answer: Future[Any]) -> None:
            self._post(Described(id, generation, None if answer.exception() else answer.result()))

        self._order(id, "condition", HEALTH, (generation,), done)

    def steps_after(self, id: str, step: int) -> None:
        def done(answer: Future[Any]) -> None:
            self._post(StepsFetched(id, None if answer.exception() else answer.result()))

        self._order(id, "steps_after", ORDERS, (step,), done)

    def harm(self, id: str, number: int, resume_s: float | None) -> None:
        """Have the worker send itself a signal, for a fault script."""
        self._order(id, "harm", ORDERS, (number, resume_s))

    def kill(self, id: str) -> None:
        """End the worker's process, also if it is frozen, where it can be reached."""
        pid = self._local.get(id)
        if pid is not None and id in self._actors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.dismiss(id)

    def bury(self, id: str) -> None:
        """The worker's process is gone. Ray is let alone with it until it has said why: Lost."""
        self._local.pop(id, None)
        actor = self._actors.pop(id, None)
        if actor is not None:
            self._buried[id] = actor
        self._lifelines.cut(id)

    def dismiss(self, id: str) -> None:
        """End the process of a worker that answers."""
        self._local.pop(id, None)
        actor = self._actors.pop(id, None)
        if actor is not None:
            ray.kill(actor)
        self._lifelines.cut(id)

    def dismiss_all(self) -> None:
        for id in list(self._actors):
            self.dismiss(id)
        for actor in list(self._buried.values()):
            ray.kill(actor)
        self._lifelines.close()

    def _tell(self, signal: Signal) -> None:
        """What the lifelines tell; with it, which processes can be reached by signals."""
        match signal:
            case Arrived(id, pid, node) if node == self._node:
                self._local[id] = pid
            case Cut(id):
                self._local.pop(id, None)
        self._post(signal)

    def _lost(self, id: str, error: BaseException, what: str) -> None:
        cause = loss_cause(error)
        if cause.kind is CauseKind.UNAVAILABLE:
            self._post(Unavailable(id, cause.text))
        else:
            self._buried.pop(id, None)
            self._post(Lost(id, f"{what}: {cause.text}", cause))

    def _order(
        self,
        id: str,
        method: str,
        group: str,
        arguments: tuple[Any, ...],
        done: Callable[[Future[Any]], None] = lambda _: None,
    ) -> None:
        actor = self._actors.get(id)
        if actor is not None:
            self._call(getattr(actor, method).options(concurrency_group=group), arguments, done)

    @staticmethod
    def _call(method: Any, arguments: tuple[Any, ...], done: Callable[[Future[Any]], None]) -> None:
        method.remote(*arguments).future().add_done_callback(done)


def _raised(error: RayTaskError) -> str:
    cause = error.cause if error.cause is not None else error
    return f"{type(cause).__name__}: {cause}"
