"""What an operator asks of a live run, and what is answered: the files' names and content. Pure but for the
storage that is handed in.

A command writes `requests/<name>.json` into the run's storage, so it works from any machine that sees that.
The run's driver finds it there (`inbox`), writes `requests/<name>.answer`, and only then removes the request;
the command removes the answer when it has read it. Each is one whole object, so whoever dies in between
leaves either of the two, never half of one. A request is addressed to one attempt: a later one does not do
what was asked of an earlier.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from worldline.storage import NotFound, Storage

FOLDER = "requests/"
REQUEST, ANSWER = ".json", ".answer"
MAX_BYTES = 1 << 16
MAX_TEXT = 200
MAX_SHOWN = 8
SHORTEST_NODE = 4
"""Characters of a node's id that must be given at least."""


class BadRequest(ValueError):
    """Nothing that a driver of this version understands; the message says why."""


@dataclass(frozen=True)
class StopAsked:
    """End in order. attempt: to which it is addressed; by: who asks. So in all of them."""

    attempt: int
    by: str


@dataclass(frozen=True)
class ResizeAsked:
    attempt: int
    by: str
    workers: int


@dataclass(frozen=True)
class DrainAsked:
    """target: as a person names a worker or a node, see `named`."""

    attempt: int
    by: str
    target: str
    lead_s: float


Request = StopAsked | ResizeAsked | DrainAsked
COMMANDS: Mapping[str, type[Request]] = {"stop": StopAsked, "resize": ResizeAsked, "drain": DrainAsked}


class Outcome(StrEnum):
    DONE = "done"  # it is being done
    REFUSED = "refused"  # what was asked cannot be done as it was asked
    TRY_AGAIN = "try_again"  # not by this attempt


@dataclass(frozen=True)
class Answered:
    outcome: Outcome
    sentence: str


def encode(request: Request) -> bytes:
    command = next(name for name, kind in COMMANDS.items() if isinstance(request, kind))
    return json.dumps({"command": command} | asdict(request)).encode()


def decode(data: bytes) -> Request:
    """Raises BadRequest for whatever is not exactly what `encode` writes."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest("the request is not JSON") from error
    if not isinstance(content, dict):
        raise BadRequest("the request is no JSON object")
    command = content.pop("command", None)
    kind = COMMANDS.get(command) if isinstance(command, str) else None
    if kind is None:
        raise BadRequest(f"unknown command {_shown(command)}: this driver knows {', '.join(COMMANDS)}")
    names = [field.name for field in fields(kind)]
    for name in names:
        if name not in content:
            raise BadRequest(f"a request to {command} needs {name!r}")
        if not _CHECKS[name][0](content[name]):
            raise BadRequest(f"{command}: {name} must be {_CHECKS[name][1]}, found {_shown(content[name])}")
    if unknown := sorted(content.keys() - set(names)):
        raise BadRequest(f"{command}: unknown {_shown(unknown[0])}: it takes {', '.join(names)}")
    return kind(**content)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "attempt": (_whole, "a number above 0"),
    "workers": (_whole, "a number above 0"),
    "by": (_text, f"one line of at most {MAX_TEXT} characters"),
    "target": (_text, f"one line of at most {MAX_TEXT} characters"),
    "lead_s": (_seconds, "a number of seconds"),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Named(NamedTuple):
    """A worker, as one may be named. rank: -1 for one that stands by."""

    id: str
    rank: int
    node: str
    ip: str


def named(target: str, workers: Sequence[Named]) -> tuple[str, ...]:
    """Ids of the workers that `target` means, in order.

    It is a rank ("2"), a worker's id as events have it ("w3"), or a node: its address or the beginning of its
    id. Raises ValueError with a sentence where it means none, or several nodes.
    """
    if target.isdecimal():
        found = [worker.id for worker in workers if worker.rank == int(target)]
        if found:
            return tuple(found)
    found = [worker.id for worker in workers if target in (worker.id, worker.ip)]
    if found:
        return tuple(found)
    if len(target) >= SHORTEST_NODE:
        nodes = {worker.node for worker in workers if worker.node.startswith(target)}
        if len(nodes) > 1:
            raise ValueError(f"{target!r} begins the ids of {len(nodes)} nodes: give more of it")
        if nodes:
            return tuple(worker.id for worker in workers if worker.node in nodes)
    shown = [w.id if w.rank < 0 else f"{w.rank} ({w.id} on {w.ip})" for w in workers[:MAX_SHOWN]]
    if len(workers) > MAX_SHOWN:
        shown.append(f"{len(workers) - MAX_SHOWN} more")
    raise ValueError(f"there is no worker or node {target!r}; there is {', '.join(shown) or 'none at all'}")


def size_fault(workers: int, least: int, num_shards: int) -> str:
    """Why a run cannot have so many workers, empty if it can. least: world.min."""
    if workers < least:
        return f"{workers} is below world.min, which is {least}"
    if workers > num_shards:
        return (
            f"{workers} is above batch.logical_shards, which is {num_shards}: each worker needs one at least"
        )
    return ""


# The files


def name(now: float, token: str) -> str:
    """Of a request at Unix time `now`; token: 32 hexadecimal digits that nobody else has."""
    return f"{int(now * 1000):013d}-{token}"


_KEY = re.compile(rf"{FOLDER}(\d{{13}}-[0-9a-f]{{32}}){re.escape(REQUEST)}")


def send(storage: Storage, name: str, request: Request) -> None:
    """Raises StorageError."""
    storage.put(f"{FOLDER}{name}{REQUEST}", encode(request))


def withdraw(storage: Storage, name: str) -> None:
    """What no driver has read by now none will; and its answer, if it came after all."""
    storage.delete(f"{FOLDER}{name}{REQUEST}")
    storage.delete(f"{FOLDER}{name}{ANSWER}")


def take_answer(storage: Storage, name: str) -> Answered | None:
    """The answer, once it is there; it is removed. Raises StorageError."""
    key = f"{FOLDER}{name}{ANSWER}"
    try:
        content = json.loads(storage.get(key))
    except NotFound:
        return None
    storage.delete(key)
    return Answered(Outcome(content["outcome"]), content["sentence"])


def waiting(storage: Storage) -> list[str]:
    """Names of the requests that are not answered, oldest first."""
    return [match[1] for key in storage.list(FOLDER) if (match := _KEY.fullmatch(key))]


def read(storage: Storage, name: str) -> Request:
    """Raises BadRequest, NotFound if it was withdrawn, StorageError."""
    key = f"{FOLDER}{name}{REQUEST}"
    if storage.size(key) > MAX_BYTES:
        raise BadRequest(f"the request has more than {MAX_BYTES} bytes")
    return decode(storage.get(key))


def answer(storage: Storage, name: str, answered: Answered) -> None:
    """Write the answer, then remove the request. Raises StorageError."""
    storage.put(f"{FOLDER}{name}{ANSWER}", json.dumps(asdict(answered)).encode())
    storage.delete(f"{FOLDER}{name}{REQUEST}")


def forget_answer(storage: Storage, name: str) -> None:
    storage.delete(f"{FOLDER}{name}{ANSWER}")


def clear_answers(storage: Storage) -> None:
    """Remove the answers that nobody came for. Raises StorageError."""
    for key in storage.list(FOLDER):
        if key.endswith(ANSWER):
            storage.delete(key)
