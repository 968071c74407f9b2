"""How the ranks of a generation connect: once for each lane, in threads that can be left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from worldline.collective import loops
from worldline.collective.group import (
    ABANDONED,
    LANES,
    POLL,
    Abandoned,
    Cancelled,
    CollectiveFailed,
    GlooGroup,
    first_line,
)
from worldline.collective.reach import Door

LOOK_S = 8.0
"""When forming takes so long, the ranks look whether they can reach each other: with PROBE_S who cannot be
reached is named within 10 s."""
ANSWER_S = 5.0
"""For PROBE_S and what the store takes."""

_IDLE: dict[Any, list[Any]] = {}
"""Connections to each store that nobody waits on. The next group uses them again, for connecting looks up the
peer's name on both sides, and that takes seconds where the name server is slow."""


def connect_ahead(store: Any) -> None:
    """Make the connections to `store` that forming takes, for one group and one that comes to nothing."""
    _IDLE[store] = [store.clone() for _ in range(2 * LANES)]


GroupType = TypeVar("GroupType", bound=GlooGroup)

Connect = Callable[[Any], Any]
"""(store of one lane) -> the backend's process group of this rank, connected to all others."""


def meet(
    store: Any,
    connect: Connect,
    lanes: range,
    *,
    prefix: str,
    rank: int,
    size: int,
    address: str,
    form_timeout_s: float,
    cancelled: Cancelled,
) -> list[Any]:
    """Connect the `size` ranks that meet under `prefix` of the TCPStore `store`, once for each of `lanes`.

    Connecting runs in side threads that are left behind when `cancelled` or the deadline ends the wait, since
    a peer that died meanwhile would hold them. Raises CollectiveFailed, which says who has not come or cannot
    be reached, or Abandoned.
    """
    door = Door(rank, size, address)
    connected: dict[int, Any] = {}
    errors: list[str] = []
    finished = threading.Semaphore(0)

    def connect_lane(lane: int) -> None:
        try:
            connection = _idle_connection(store)
            if lane == lanes[0]:
                door.announce(PrefixStore(prefix, connection))
            connected[lane] = connect(PrefixStore(f"{prefix}/lane{lane}", connection))
            _IDLE[store].append(connection)
        except Exception as error:
            errors.append(first_line(error))
        finally:
            finished.release()
        if lane not in connected:
            with contextlib.suppress(RuntimeError):  # the store is gone, and the next forming will say so
                _IDLE[store].append(store.clone())

    for lane in lanes:
        threading.Thread(target=connect_lane, args=(lane,), name=f"form-{prefix}-{lane}", daemon=True).start()
    look: _Look | None = None
    began = time.monotonic()
    try:
        for _ in lanes:
            while not finished.acquire(timeout=POLL.total_seconds()):
                if cancelled():
                    raise Abandoned(f"gave up forming {prefix} on order")
                taken = time.monotonic() - began
                if taken > form_timeout_s:
                    raise CollectiveFailed(
                        f"forming {prefix}: the {size} ranks did not meet in {form_timeout_s:g} s"
                        + _Look(door.complaint, store, prefix).finding(cancelled)
                    )
                if look is None and taken > LOOK_S:
                    look = _Look(door.unreached, store, prefix)
                elif look is not None and look.found:
                    raise CollectiveFailed(f"forming {prefix}: the {size} ranks do not meet" + look.found)
        if errors:
            finding = _Look(door.complaint, store, prefix).finding(cancelled)
            raise CollectiveFailed(f"forming {prefix}: {errors[0]}" + finding)
    except (Abandoned, CollectiveFailed):
        ABANDONED.append(connected)
        raise
    finally:
        door.close()
    return [connected[lane] for lane in lanes]


class _Look:
    """A look at why ranks do not meet, in a thread of its own, so that an order to leave ends the wait."""

    def __init__(self, look: Callable[[Any], str], store: Any, prefix: str) -> None:
        self.found = ""
        self._ended = threading.Event()

        def find() -> None:
            try:
                complaint = look(PrefixStore(prefix, store.clone()))
            except (RuntimeError, OSError) as error:  # the store is gone, or there are no sockets left
                complaint = first_line(error)
            self.found = f"; {complaint}" if complaint else ""
            self._ended.set()

        threading.Thread(target=find, name=f"look-{prefix}", daemon=True).start()

    def finding(self, cancelled: Cancelled) -> str:
        """What was found within ANSWER_S; nothing where the order to leave came first."""
        deadline = time.monotonic() + ANSWER_S
        while not self._ended.wait(POLL.total_seconds()):
            if cancelled() or time.monotonic() > deadline:
                break
        return self.found


def enter(
    kind: Callable[..., GroupType],
    store: Any,
    connect: Connect,
    *,
    prefix: str,
    rank: int,
    size: int,
    address: str,
    form_timeout_s: float,
    timeout_s: float,
    cancelled: Cancelled,
) -> GroupType:
    """A group of that kind whose lanes are connected by `connect`, those of a step now."""
    meeting = partial(
        meet, store, connect, prefix=prefix, rank=rank, size=size, address=address, cancelled=cancelled
    )
    lanes = meeting(range(LANES), form_timeout_s=form_timeout_s)
    return kind(lanes, rank, size, timeout_s, cancelled, partial(meeting, form_timeout_s=timeout_s))


def form_gloo(
    store: Any,
    *,
    prefix: str,
    rank: int,
    size: int,
    address: str,
    form_timeout_s: float,
    timeout_s: float,
    cancelled: Cancelled,
) -> GlooGroup:
    """The gloo group of rank `rank` of `size`; `address` is this node's as the peers reach it.

    form_timeout_s bounds the meeting, timeout_s later every operation. Raises CollectiveFailed or Abandoned.
    """

    found: list[int] = []

    def connect(meeting: Any) -> Any:
        device, its_loops = loops.loops_of(lambda: dist.ProcessGroupGloo.create_device(hostname=address))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        options._devices = [device]
        lane = dist.ProcessGroupGloo(meeting, rank, size, options)
        found.extend(its_loops)
        return lane

    loops.settle()
    group = enter(
        GlooGroup,
        store,
        connect,
        prefix=prefix,
        rank=rank,
        size=size,
        address=address,
        form_timeout_s=form_timeout_s,
        timeout_s=timeout_s,
        cancelled=cancelled,
    )
    group.loops = found
    return group


def _idle_connection(store: Any) -> Any:
    """One that no other thread uses: threads that share a connection wait for each other."""
    try:
        return _IDLE.setdefault(store, []).pop()
    except IndexError:
        return store.clone()
