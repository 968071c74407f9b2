"""However a worker ends, what it has started ends with it; SIGTERM is told before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.cluster.processes import is_alive

from worldline.control.causes import CauseKind, loss_cause
from worldline.control.cluster import node_address
from worldline.control.drains import Drains, drain_node
from worldline.control.lifelines import Lifelines
from worldline.control.signals import NodeDraining
from worldline.worker.actor import CONCURRENCY_GROUPS, ORDERS, TRAIN, Worker
from worldline.worker.notice import ECHO_S, LEAD_S
from worldline.worker.orders import Notice

pytestmark = pytest.mark.cluster

FREE_S = 20.0
"""The next generation must get what a dead worker's children held within this time."""
START_S = 120.0

CHILD = """
import fcntl, os, subprocess, sys, time
lock, grandchild = sys.argv[1:]
if grandchild:
    subprocess.Popen([sys.executable, __file__, grandchild, ""])
held = open(lock, "w")
fcntl.flock(held, fcntl.LOCK_EX)
open(f"{lock}.held", "w").close()
time.sleep(300)
"""


def subject_class() -> type[Worker]:
    """Made here, so that Ray sends the code of the class and the workers need not import it."""

    class Subject(Worker):
        def locks(self, folder: str, program: str) -> tuple[int, list[str]]:
            """Start processes that hold a lock each. Returns this process's pid and the files they lock."""
            import subprocess

            names = ["child", "grandchild", "session", "in the session", "fork"]
            locks = [os.path.join(folder, name) for name in names]
            python = [sys.executable, program]
            subprocess.Popen([*python, *locks[:2]])
            subprocess.Popen([*python, *locks[2:4]], start_new_session=True)
            if not os.fork():
                os.setsid()
                held = os.open(locks[4], os.O_CREAT | os.O_RDWR)
                fcntl.flock(held, fcntl.LOCK_EX)
                os.close(os.open(f"{locks[4]}.held", os.O_CREAT))
                while True:
                    time.sleep(300)
            return os.getpid(), locks

        def be_ready(self) -> int:
            self._built: Any = object()
            return os.getpid()

        def said(self, wait_s: float) -> tuple[Any, ...]:
            return self._mailbox.fetch(wait_s)

        def wait(self) -> None:
            time.sleep(300)

        def leave(self) -> None:
            ray.actor.exit_actor()

    return Subject


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, and a node that may die."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="wl-", dir="/tmp")
    settings = {"object_store_memory": 100 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False, **settings}
        )
        node = cluster.add_node(num_cpus=1, resources={"doomed": 1}, **settings)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield node
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(cluster: Any) -> Iterator[Callable[..., Any]]:
    actors: list[Any] = []
    lifelines = Lifelines(lambda signal: None, beat_s=0.5, silent_s=START_S)
    anchor = lifelines.anchor(node_address())
    actor_class: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(subject_class())

    def start(**options: Any) -> Any:
        actors.append(actor_class.options(num_cpus=1, **options).remote(f"w{len(actors)}", anchor))
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)
    lifelines.close()


def hold(actor: Any, folder: Path) -> tuple[int, list[str]]:
    """All of the actor's processes hold their locks."""
    program = folder / "child.py"
    program.write_text(CHILD)
    order = actor.locks.options(concurrency_group=ORDERS)
    pid, locks = ray.get(order.remote(str(folder), str(program)), timeout=START_S)
    deadline = time.monotonic() + START_S
    while not all(Path(f"{lock}.held").exists() for lock in locks):
        assert time.monotonic() < deadline, f"not all of {locks} are held"
        time.sleep(0.05)
    return pid, locks


def assert_free(locks: list[str]) -> None:
    deadline = time.monotonic() + FREE_S
    held = locks
    while held := [lock for lock in held if not is_free(lock)]:
        assert time.monotonic() < deadline, f"{held} are held"
        time.sleep(0.05)


def is_free(lock: str) -> bool:
    with open(lock) as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def die(actor: Any, end: Callable[[], Any]) -> BaseException:
    """What a call that is pending meanwhile raises."""
    pending = actor.wait.options(concurrency_group=TRAIN).remote()
    end()
    with pytest.raises(ray.exceptions.RayError) as raised:
        ray.get(pending, timeout=START_S)
    return raised.value


def test_a_killed_workers_children_let_go(start, tmp_path):
    actor = start()
    pid, locks = hold(actor, tmp_path)
    error = die(actor, lambda: os.kill(pid, signal.SIGKILL))
    assert_free(locks)
    assert loss_cause(error).kind is CauseKind.PROCESS_DIED


def test_a_dismissed_workers_children_let_go(start, tmp_path):
    actor = start()
    pid, locks = hold(actor, tmp_path)
    error = die(actor, lambda: ray.kill(actor))
    assert_free(locks)
    assert not is_alive(pid)
    assert loss_cause(error).kind is CauseKind.PROCESS_DIED


def test_the_children_of_one_that_leaves_let_go(start, tmp_path):
    actor = start()
    _, locks = hold(actor, tmp_path)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.leave.options(concurrency_group=ORDERS).remote(), timeout=START_S)
    assert_free(locks)


def test_sigterm_is_told_and_the_second_ends(start):
    actor = start()
    pid = ray.get(actor.be_ready.remote(), timeout=START_S)
    said = actor.said.options(concurrency_group=ORDERS).remote(START_S)
    os.kill(pid, signal.SIGTERM)
    assert ray.get(said, timeout=START_S) == (Notice("SIGTERM", LEAD_S),)
    time.sleep(ECHO_S)
    assert is_alive(pid)
    error = die(actor, lambda: os.kill(pid, signal.SIGTERM))
    assert loss_cause(error).kind is CauseKind.PROCESS_DIED


def test_sigterm_ends_one_that_is_not_ready(start, tmp_path):
    actor = start()
    pid, locks = hold(actor, tmp_path)
    die(actor, lambda: os.kill(pid, signal.SIGTERM))
    assert_free(locks)


def test_a_worker_ends_with_its_raylet_after_a_drain_that_was_seen(cluster, start, tmp_path):
    actor = start(resources={"doomed": 1})
    pid, locks = hold(actor, tmp_path)
    told: queue.SimpleQueue[NodeDraining] = queue.SimpleQueue()
    with Drains(told.put):
        drain_node(cluster.node_id, lead_s=60)
        node = told.get(timeout=START_S)
    assert node.node == cluster.node_id
    assert 20 < node.lead_s <= 60
    with pytest.raises(LookupError, match="is it gone"):
        drain_node("ab" * 28, lead_s=20)
    assert is_alive(pid)
    error = die(actor, cluster.kill_raylet)
    assert_free(locks)
    assert not is_alive(pid)
    assert loss_cause(error).kind in (CauseKind.UNAVAILABLE, CauseKind.NODE_DIED)
