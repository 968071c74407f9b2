"""Process groups that can be left at any moment: form, exchange, poll, abandon.

A gloo group with an operation in flight cannot be aborted, and destroying it blocks until its timeout. So
nothing here ever destroys one: waiting polls, an abandoned group is kept referenced for ever together with
the buffers of its operations, and a new group is formed beside it under a new store prefix.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from worldline.collective.operations import Operation, OperationLog

Cancelled = Callable[[], bool]

_ABANDONED: list[Any] = []
"""Broken groups and the buffers they may still write to; freeing them could block or corrupt memory."""

_POLL = timedelta(milliseconds=5)


class CollectiveFailed(RuntimeError):
    """An operation of the group failed: a peer is gone or unreachable."""


class Abandoned(RuntimeError):
    """The wait was given up on order."""


class Pending(Protocol):
    """An operation under way."""

    operation: Operation

    def done(self) -> bool: ...


class Group(Protocol):
    """Ranks 0..size-1 of one generation that exchange bytes; no operation does arithmetic but `all_reduce`.

    Protocol: every rank calls the same operations in the same order within a lane. Lanes are independent of
    each other, so an operation in lane 1 may be started whenever its input is ready without ordering it
    against lane 0. `wait` returns when the operation is done, raises CollectiveFailed when it or the group
    broke, Abandoned when the group's `cancelled` says so. After any raise call `abandon()`; nothing else is
    allowed then. Meanwhile any thread may look at the `log` of what this rank entered, and ask what of it is
    `unfinished`. The lane ASIDE is for operations that are no part of a step; all ranks call `connect_aside`
    before its first one, which costs what forming a group costs and raises as `wait` does.
    """

    rank: int
    size: int
    device: torch.device
    log: OperationLog

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        lane: int,
        label: str,
    ) -> Pending: ...

    def all_reduce(self, tensor: torch.Tensor, lane: int, label: str) -> Pending: ...

    def wait(self, pending: Pending) -> None: ...

    def connect_aside(self, label: str) -> None: ...

    def unfinished(self) -> tuple[Operation, ...]: ...

    def abandon(self) -> None: ...


class Work:
    """A backend's work handle together with the tensors that must live as long as it does."""

    __slots__ = ("_tensors", "_work", "operation")

    def __init__(self, work: Any, operation: Operation, *tensors: torch.Tensor) -> None:
        self._work = work
        self._tensors = tensors
        self.operation = operation

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta) -> bool:
        """Whether it completed within `timeout`; raises the operation's own error."""
        try:
            self._work.wait(timeout)
        except RuntimeError:
            # The backend says "timed out" by the same type; ask again, for it may have ended just now.
            if not self._work.is_completed():
                return False
            self._work.wait()
        return True


class GlooGroup:
    """A `Group` over gloo's TCP transport, one gloo process group a lane."""

    device = torch.device("cpu")
    work_type = Work

    def __init__(
        self,
        lanes: list[Any],
        rank: int,
        size: int,
        timeout_s: float,
        cancelled: Cancelled,
        more_lanes: Callable[[range], list[Any]],
    ) -> None:
        self.rank = rank
        self.size = size
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._more_lanes = more_lanes
        self._in_flight: list[Work] = []
        self.log = OperationLog(ASIDE + 1)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        lane: int,
        label: str,
    ) -> Pending:
        # Empty lists would choose another algorithm for even splits; ranks must never choose differently.
        outs, ins = list(output_splits), list(input_splits)
        return self._start(
            lambda: self._lanes[lane].alltoall_base(output, input, outs, ins, dist.AllToAllOptions()),
            self.log.enter(lane, "all_to_all", label, input.nbytes),
            output,
            input,
        )

    def all_reduce(self, tensor: torch.Tensor, lane: int, label: str) -> Pending:
        operation = self.log.enter(lane, "all_reduce", label, tensor.nbytes)
        return self._start(lambda: self._lanes[lane].allreduce([tensor]), operation, tensor)

    def wait(self, pending: Pending) -> None:
        assert isinstance(pending, Work)
        operation, began = pending.operation, time.monotonic()
        deadline = began + self._timeout_s
        self.log.waiting = operation, began
        try:
            while not pending.wait(_POLL):
                if self._cancelled():
                    raise Abandoned(f"gave up waiting in {operation.what} on order")
                if time.monotonic() > deadline:
                    silent = f"no answer from a peer in {self._timeout_s:g} s"
                    raise CollectiveFailed(f"{operation.what}: {silent}")
        except (Abandoned, CollectiveFailed):
            raise
        except RuntimeError as error:
            raise CollectiveFailed(f"{operation.what}: {_first_line(error)}") from error
        finally:
            self.log.waiting = None

    def connect_aside(self, label: str) -> None:
        """Connect the lane ASIDE, unless it is connected."""
        if len(self._lanes) > ASIDE:
            return
        # Who waits for the others to come shows like who waits in an operation.
        self.log.waiting = self.log.enter(ASIDE, "connect", label, 0), time.monotonic()
        try:
            self._lanes += self._more_lanes(range(ASIDE, ASIDE + 1))
        finally:
            self.log.waiting = None

    def unfinished(self) -> tuple[Operation, ...]:
        """The operations that are entered and still under way."""
        return tuple(work.operation for work in list(self._in_flight) if not work.done())

    def abandon(self) -> None:
        """Leave the group; peers that wait in it see their connections stay silent, not closed."""
        _ABANDONED.append((self._lanes, [work for work in self._in_flight if not work.done()]))
        self._in_flight = []

    def _start(self, start: Callable[[], Any], operation: Operation, *tensors: torch.Tensor) -> Work:
        try:
            work = self.work_type(start(), operation, *tensors)
        except RuntimeError as error:
            raise CollectiveFailed(f"{operation.what}: {_first_line(error)}") from error
        if len(self._in_flight) >= 64:
            self._in_flight = [w for w in self._in_flight if not w.done()]
        self._in_flight.append(work)
        return work


LANES = 2
"""One for sums on their way to their owners, one for results on their way back."""

ASIDE = LANES
"""One for what is no part of a step; connected when it is first needed."""

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
    size: int,
    form_timeout_s: float,
    cancelled: Cancelled,
) -> list[Any]:
    """Connect the `size` ranks that meet under `prefix` of the TCPStore `store`, once for each of `lanes`.

    Connecting runs in side threads that are left behind when `cancelled` or the deadline ends the wait, since
    a peer that died meanwhile would hold them. Raises CollectiveFailed or Abandoned.
    """
    connected: dict[int, Any] = {}
    errors: list[str] = []
    finished = threading.Semaphore(0)

    def connect_lane(lane: int) -> None:
        try:
            connection = _idle_connection(store)
            connected[lane] = connect(PrefixStore(f"{prefix}/lane{lane}", connection))
            _IDLE[store].append(connection)
        except Exception as error:
            errors.append(_first_line(error))
        finally:
            finished.release()
        if lane not in connected:
            with contextlib.suppress(RuntimeError):  # the store is gone, and the next forming will say so
                _IDLE[store].append(store.clone())

    for lane in lanes:
        threading.Thread(target=connect_lane, args=(lane,), name=f"form-{prefix}-{lane}", daemon=True).start()
    deadline = time.monotonic() + form_timeout_s
    for _ in lanes:
        while not finished.acquire(timeout=_POLL.total_seconds()):
            if cancelled():
                _ABANDONED.append(connected)
                raise Abandoned(f"gave up forming {prefix} on order")
            if time.monotonic() > deadline:
                _ABANDONED.append(connected)
                raise CollectiveFailed(
                    f"forming {prefix}: the {size} ranks did not meet in {form_timeout_s:g} s"
                )
    if errors:
        _ABANDONED.append(connected)
        raise CollectiveFailed(f"forming {prefix}: {errors[0]}")
    return [connected[lane] for lane in lanes]


def enter(
    kind: Callable[..., GroupType],
    store: Any,
    connect: Connect,
    *,
    prefix: str,
    rank: int,
    size: int,
    form_timeout_s: float,
    timeout_s: float,
    cancelled: Cancelled,
) -> GroupType:
    """A group of that kind whose lanes are connected by `connect`, those of a step now."""
    meeting = partial(meet, store, connect, prefix=prefix, size=size, cancelled=cancelled)
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

    def connect(meeting: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(meeting, rank, size, options)

    return enter(
        GlooGroup,
        store,
        connect,
        prefix=prefix,
        rank=rank,
        size=size,
        form_timeout_s=form_timeout_s,
        timeout_s=timeout_s,
        cancelled=cancelled,
    )


def _idle_connection(store: Any) -> Any:
    """One that no other thread uses: threads that share a connection wait for each other."""
    try:
        return _IDLE.setdefault(store, []).pop()
    except IndexError:
        return store.clone()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
