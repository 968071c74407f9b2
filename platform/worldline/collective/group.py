"""Process groups that can be left at any moment: exchange, poll, abandon.

A gloo group with an operation in flight cannot be aborted, and destroying it blocks until its timeout. So
nothing here ever destroys one: waiting polls, an abandoned group is kept referenced for ever together with
the buffers of its operations, and a new group is formed beside it under a new store prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from worldline.collective import loops
from worldline.collective.operations import Operation, OperationLog

Cancelled = Callable[[], bool]

ABANDONED: list[Any] = []
"""Broken groups and the buffers they may still write to; freeing them could block or corrupt memory."""

POLL = timedelta(milliseconds=5)


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
        self._in_flight: dict[Work, None] = {}  # in the order of their start, until they are waited for
        self.log = OperationLog(ASIDE + 1)
        self.loops: list[int] = []  # of all its lanes, as `collective.loops` has them

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
            while not pending.wait(POLL):
                if self._cancelled():
                    raise Abandoned(f"gave up waiting in {operation.what} on order")
                if time.monotonic() > deadline:
                    silent = f"no answer from a peer in {self._timeout_s:g} s"
                    raise CollectiveFailed(f"{operation.what}: {silent}")
        except (Abandoned, CollectiveFailed):
            raise
        except RuntimeError as error:
            raise CollectiveFailed(f"{operation.what}: {first_line(error)}") from error
        finally:
            self.log.waiting = None
        # Its tensors are the caller's alone again; what travels from peer to peer may be as large as memory.
        self._in_flight.pop(pending, None)

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
        ABANDONED.append((self._lanes, [work for work in self._in_flight if not work.done()]))
        self._in_flight = {}
        loops.leave(self.loops)

    def _start(self, start: Callable[[], Any], operation: Operation, *tensors: torch.Tensor) -> Work:
        try:
            work = self.work_type(start(), operation, *tensors)
        except RuntimeError as error:
            raise CollectiveFailed(f"{operation.what}: {first_line(error)}") from error
        self._in_flight[work] = None
        return work


LANES = 2
"""One for sums on their way to their owners, one for results on their way back."""

ASIDE = LANES
"""One for what is no part of a step; connected when it is first needed."""


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
