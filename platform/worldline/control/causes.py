"""Why a worker is lost: what Ray's error means, by name. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RuntimeEnvSetupError,
)


class CauseKind(StrEnum):
    OUT_OF_MEMORY = "out of memory"  # its node's memory was nearly full, and Ray's memory monitor chose it
    NODE_DIED = "node died"
    PROCESS_DIED = "process died"
    START_FAILED = "start failed"  # its environment could not be made, or Ray has no place for it
    UNAVAILABLE = "unavailable"  # the connection broke: suspect, not dead
    OTHER = "other"  # no loss: the call failed, for a reason of its own


@dataclass(frozen=True)
class Cause:
    """text: one line for a person, with what Ray tells of node, memory and exit."""

    kind: CauseKind
    text: str

    @property
    def gone(self) -> bool:
        """Whether the worker is gone for good, as far as Ray knows."""
        return self.kind not in (CauseKind.UNAVAILABLE, CauseKind.OTHER)


TEXT_CHARS = 300
EXIT = re.compile(r"Worker exit type: (?P<type>\w+) Worker exit detail: (?P<detail>.*)", re.DOTALL)
GUESSES = re.compile(r"\s*(Some common causes include|There are some potential root causes).*", re.DOTALL)
"""What Ray adds to every exit that it cannot explain, the kernel's OOM killer among it."""
NODE = re.compile(r"its node has died\. Node Id: (?P<node>\w+)\s*(?P<why>.*)", re.DOTALL)
MEMORY = re.compile(
    r"node \(IP: (?P<ip>[^,]+), ID: (?P<node>\w+)\) was (?P<used>\S+) used / (?P<limit>\S+) limit"
)
VICTIM = re.compile(r"Selected to kill: .*?pid=(?P<pid>\d+), actual memory used=(?P<used>[^,]+),")


def loss_cause(error: BaseException) -> Cause:
    """By the error's type; by its text where Ray has one type for several things.

    Out of memory is what Ray's memory monitor says so of. The kernel's OOM killer cannot be told from any
    other SIGKILL: it is PROCESS_DIED. (Counters tell how often it acted, `oom_kill` in the node's
    `/proc/vmstat` and in the cgroup's `memory.events`, but not on whom.)
    """
    text = str(error).strip()
    match error:
        case OutOfMemoryError():
            return Cause(CauseKind.OUT_OF_MEMORY, _memory(text))
        case NodeDiedError():
            return Cause(CauseKind.NODE_DIED, _line(text))
        case RuntimeEnvSetupError():
            return Cause(CauseKind.START_FAILED, f"its runtime environment: {_line(_last(text))}")
        case ActorUnschedulableError():
            return Cause(CauseKind.START_FAILED, _line(text))
        case ActorUnavailableError():
            return Cause(CauseKind.UNAVAILABLE, _line(text))
        case ActorDiedError(actor_init_failed=True):
            return Cause(CauseKind.START_FAILED, _line(_last(text)))
        case ActorDiedError():
            return _death(text, error.preempted)
        case _:
            return Cause(CauseKind.OTHER, _line(f"{type(error).__name__}: {text}"))


def _death(text: str, preempted: bool) -> Cause:
    if node := NODE.search(text):
        why = node["why"].removeprefix("the actor's node was ")
        return Cause(CauseKind.NODE_DIED, _line(f"node {node['node'][:8]}: {why}"))
    if preempted:
        return Cause(CauseKind.NODE_DIED, "its node was taken back")
    if process := EXIT.search(text):
        kind = CauseKind.PROCESS_DIED
        if process["type"] == "NODE_OUT_OF_MEMORY":
            kind = CauseKind.OUT_OF_MEMORY
        return Cause(kind, _line(GUESSES.sub("", process["detail"])))
    # Before the reason come the actor's class, ids and addresses, each indented.
    return Cause(CauseKind.PROCESS_DIED, _line(_last(text)))


def _memory(text: str) -> str:
    node = MEMORY.search(text)
    if node is None:
        return _line(text)
    used = f"{node['used']} of {node['limit']} used on node {node['node'][:8]} ({node['ip']})"
    victims = [f"pid {victim['pid']} with {victim['used']}" for victim in VICTIM.finditer(text)]
    return f"{used}; Ray's memory monitor ended {', '.join(victims) or 'it'}"


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _line(text: str) -> str:
    first = text.strip().partition("\n")[0].strip()
    return first if len(first) <= TEXT_CHARS else f"{first[:TEXT_CHARS]}..."
