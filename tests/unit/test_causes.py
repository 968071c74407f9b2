"""Ray's errors by name. The texts are Ray 2.60's, as a driver saw them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from worldline.control.causes import TEXT_CHARS, Cause, CauseKind, loss_cause

ID = bytes.fromhex("576ac600fa9935735acd6e7b01000000")

MONITOR = """1 worker(s) were killed due to the node running low on memory. Memory on the node \
(IP: 10.0.0.7, ID: ee94df0cf47de049c03d231fc2167b8ed19718fa8e17a753511c269c) was \
10.86GB used / 23.54GB limit (0.461414)
OOM kill reason: Memory usage 11584118784B exceeded threshold of 11571380224B (45.8% of 25276059648B limit)
Object store memory usage: [- objects spillable: 0
(global lru) bytes evicted: 0]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(6bea8c6b8b1fdfc0b8c449a701000000): job ID=01000000, lease ID=0000000006900dba8b80, \
task name=W.__init__, required resources={}, pid=16471, actual memory used=5.11GB, worker ID=610024b10059)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
16471\t5.11\tray::W.eat
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/"""

KILLED = """The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker \
exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was \
called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected error."""

TERMINATED = """The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker \
exit detail: Worker exits unexpectedly by a signal. SystemExit is raised (sys.exit is called). Exit code: 1. \
The process receives a SIGTERM."""

NODE = """The actor died because its node has died. Node Id: 28c441d11a85edae879c1b48ec630d8c5f8ded73843fb0e9\
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""

ENVIRONMENT = """Could not create the actor because its associated runtime env failed to be created.
[Node 10.0.0.7] Traceback (most recent call last):
  File "runtime_env_agent.py", line 561, in _create_runtime_env_with_retry
    runtime_env_context = await asyncio.wait_for(
FileNotFoundError: [Errno 2] No such file or directory: '/tmp/job.zip'
"""


def died(message: str, reason: "NodeDeathInfo.Reason | None" = None) -> ActorDiedError:
    context = ActorDiedErrorContext(
        error_message=message, actor_id=ID, pid=12759, class_name="Worker", node_ip_address="10.0.0.7"
    )
    if reason is not None:
        context.node_death_info.reason = reason
    return ActorDiedError(context)


def failed(cause: Exception) -> RayTaskError:
    text = f'Traceback (most recent call last):\n  File "job.py", line 3, in __init__\n{cause!r}'
    return RayTaskError("Worker.__init__", text, cause, actor_id=ID.hex())


UNAVAILABLE = (
    "The actor 576ac600fa9935735acd6e7b01000000 is unavailable: The connection broke. The task may or"
)

SEEN = {
    "memory monitor": (
        OutOfMemoryError(MONITOR),
        CauseKind.OUT_OF_MEMORY,
        "10.86GB of 23.54GB used on node ee94df0c (10.0.0.7); "
        "Ray's memory monitor ended pid 16471 with 5.11GB",
    ),
    "memory, other words": (OutOfMemoryError("low memory\nmore"), CauseKind.OUT_OF_MEMORY, "low memory"),
    "memory, as an exit": (
        died("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: too much.\nMore."),
        CauseKind.OUT_OF_MEMORY,
        "too much.",
    ),
    "SIGKILL": (
        died(KILLED),
        CauseKind.PROCESS_DIED,
        "Worker unexpectedly exits with a connection error code 2. End of file.",
    ),
    "SIGTERM": (
        died(TERMINATED),
        CauseKind.PROCESS_DIED,
        "Worker exits unexpectedly by a signal. SystemExit is raised (sys.exit is called). Exit code: 1. "
        "The process receives a SIGTERM.",
    ),
    "ray.kill": (
        died("The actor is dead because it was killed by `ray.kill`."),
        CauseKind.PROCESS_DIED,
        "The actor is dead because it was killed by `ray.kill`.",
    ),
    "node": (
        died(NODE, NodeDeathInfo.UNEXPECTED_TERMINATION),
        CauseKind.NODE_DIED,
        "node 28c441d1: terminated unexpectedly: health check failed due to missing too many heartbeats",
    ),
    "drained node": (
        died("", NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED),
        CauseKind.NODE_DIED,
        "its node was taken back",
    ),
    "node, of a task": (NodeDiedError("Node 7 died"), CauseKind.NODE_DIED, "Node 7 died"),
    "environment": (
        RuntimeEnvSetupError(ENVIRONMENT),
        CauseKind.START_FAILED,
        "its runtime environment: FileNotFoundError: [Errno 2] No such file or directory: '/tmp/job.zip'",
    ),
    "no place": (
        ActorUnschedulableError("the node is gone"),
        CauseKind.START_FAILED,
        "The actor is not schedulable: the node is gone",
    ),
    "constructor": (
        ActorDiedError(failed(ValueError("width"))),
        CauseKind.START_FAILED,
        "ValueError('width')",
    ),
    "unavailable": (
        ActorUnavailableError("The connection broke", ID),
        CauseKind.UNAVAILABLE,
        f"{UNAVAILABLE} may not have been executed on the actor.",
    ),
    "a failed call": (GetTimeoutError("late"), CauseKind.OTHER, "GetTimeoutError: late"),
}


@pytest.mark.parametrize(("error", "kind", "text"), SEEN.values(), ids=SEEN)
def test_what_a_driver_saw(error, kind, text):
    assert loss_cause(error) == Cause(kind, text)


def test_who_cannot_be_reached_is_not_gone():
    gone = {name for name, (error, _, _) in SEEN.items() if loss_cause(error).gone}
    assert gone == SEEN.keys() - {"unavailable", "a failed call"}


def test_several_victims_are_all_named():
    victims = MONITOR.replace(
        "]\nTop", "Selected to kill: (Task: pid=7, actual memory used=1GB, worker)\n]\nTop"
    )
    assert loss_cause(OutOfMemoryError(victims)).text.endswith("ended pid 16471 with 5.11GB, pid 7 with 1GB")


@given(st.text())
def test_whatever_ray_says_it_is_one_line_and_not_out_of_memory_unless_ray_says_so(text):
    for error in (died(text), ActorUnavailableError(text, ID), NodeDiedError(text), ValueError(text)):
        cause = loss_cause(error)
        assert cause.kind is not CauseKind.OUT_OF_MEMORY
        assert "\n" not in cause.text
        assert len(cause.text) <= TEXT_CHARS + 3
