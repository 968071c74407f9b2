"""The only file that asks Ray for actors: requests workers, carries orders, turns answers into signals."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from worldline.control.interrupts import handlers_kept
from worldline.control.signals import Ended, Fetched, Lost, Post, Ready, StartFailed, StepsFetched
from worldline.worker.actor import CONCURRENCY_GROUPS, ORDERS, REPORTS, TRAIN, Worker
from worldline.worker.orders import GenerationOrder, Hello, Invitation, Setup


def connect(cpus: float, notify: Callable[[str], None]) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one in this process with `cpus` logical CPUs."""
    # Private: each death of a worker would be told by Ray, too, in a paragraph.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
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

    Protocol: every call returns at once; what comes of it arrives as a signal. `train` answers with Ended or,
    as soon as the process is gone, with Lost. Orders to a dead worker are dropped: its Lost is on the way.
    """

    def __init__(self, setup: Setup, cpus: float, gpus: float, post: Post) -> None:
        self._setup = ray.put(setup)
        self._post = post
        self._actors: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._node = ray.get_runtime_context().get_node_id()
        self._count = 0
        as_actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)  # type: ignore[call-overload]
        self._actor_class: Any = as_actor(Worker).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )

    def request(self) -> str:
        """Ask for one more worker; answers with Ready, StartFailed or Lost. Pending, it is the demand that an
        autoscaler sees."""
        self._count += 1
        id = f"w{self._count}"
        actor = self._actor_class.remote()
        self._actors[id] = actor

        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is None:
                hello: Hello = answer.result()
                if hello.node == self._node:
                    self._local[id] = hello.pid
                self._post(Ready(id, hello))
            elif isinstance(error, RayTaskError):
                self._post(StartFailed(id, _cause(error)))
            else:
                self._post(Lost(id, f"died while it was prepared: {_first_line(error)}"))

        self._call(actor.prepare.options(concurrency_group=TRAIN), (self._setup,), done)
        return id

    def train(self, id: str, order: GenerationOrder) -> None:
        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is None:
                self._post(Ended(id, answer.result()))
            elif isinstance(error, RayActorError):
                self._post(Lost(id, f"is gone: {_first_line(error)}"))
            else:
                self._post(Lost(id, f"failed outside the job's code: {_first_line(error)}"))

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
            if error is not None:
                self._post(Lost(id, f"could not write its part of a checkpoint: {_first_line(error)}"))

        self._order(id, "write_checkpoint", ORDERS, (generation, part, parts), done)

    def fetch(self, id: str, wait_s: float) -> None:
        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if isinstance(error, ActorDiedError):  # the only call that is pending on a standby
                self._post(Lost(id, f"is gone: {_first_line(error)}"))
            else:
                self._post(Fetched(id, None if error else answer.result()))

        self._order(id, "fetch", REPORTS, (wait_s,), done)

    def steps_after(self, id: str, step: int) -> None:
        def done(answer: Future[Any]) -> None:
            self._post(StepsFetched(id, None if answer.exception() else answer.result()))

        self._order(id, "steps_after", ORDERS, (step,), done)

    def kill(self, id: str) -> None:
        """End the worker's process, also if it is frozen, where it can be reached."""
        pid = self._local.get(id)
        if pid is not None and id in self._actors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.dismiss(id)

    def dismiss(self, id: str) -> None:
        """End the process of a worker that answers."""
        self._local.pop(id, None)
        actor = self._actors.pop(id, None)
        if actor is not None:
            ray.kill(actor)

    def dismiss_all(self) -> None:
        for id in list(self._actors):
            self.dismiss(id)

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


def _cause(error: RayTaskError) -> str:
    cause = error.cause if error.cause is not None else error
    return f"{type(cause).__name__}: {cause}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
