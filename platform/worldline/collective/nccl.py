"""The `Group` over NCCL. Not run on several GPUs yet.

What differs from gloo: an operation runs on the GPU's stream, so waiting for it polls its event on the host,
which can end on order, before the stream is made to depend on it; and a broken communicator must be aborted,
or its kernels spin on the device for ever. Aborting may block, so a side thread does it.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worldline.collective.forming import enter
from worldline.collective.group import Cancelled, GlooGroup, Work

_PAUSE_S = 50e-6


class NcclWork(Work):
    """Completed once the GPU says so."""

    __slots__ = ()

    def wait(self, timeout: timedelta) -> bool:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        self._work.wait()
        return True


class NcclGroup(GlooGroup):
    """One communicator a lane, on this process's current GPU."""

    device = torch.device("cuda", 0)
    work_type = NcclWork

    def abandon(self) -> None:
        super().abandon()
        for lane in self._lanes:
            threading.Thread(target=lane.abort, name="nccl-abort", daemon=True).start()


def form_nccl(
    store: Any,
    *,
    prefix: str,
    rank: int,
    size: int,
    address: str,
    form_timeout_s: float,
    timeout_s: float,
    cancelled: Cancelled,
) -> NcclGroup:
    """As `form_gloo`; which network interface is used, NCCL decides by its own settings."""

    def connect(meeting: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        lane: Any = dist.ProcessGroupNCCL(meeting, rank, size, options)
        # The communicator is made by the first operation: here, where the wait for it can be left, and on a
        # stream of its own, which holds up no other.
        stream = torch.cuda.Stream(NcclGroup.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            lane.allreduce([torch.zeros(1, device=NcclGroup.device)]).wait()
        stream.synchronize()
        return lane

    return enter(
        NcclGroup,
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
