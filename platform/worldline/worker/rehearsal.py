"""A step for nothing, before a worker is offered, so that nobody waits for its first one."""

from __future__ import annotations

import contextlib

from worldline.data.loader import MicroBatch
from worldline.worker.checksum import checksum
from worldline.worker.engine import Engine
from worldline.worker.state import TrainState, snapshot


def rehearse(engine: Engine, state: TrainState, batch: MicroBatch) -> None:
    """One forward and backward on `batch`, whose gradients are thrown away.

    What a first call costs (libraries that load, kernels that are chosen or compiled, memory that grows) is
    then paid while the others train. If the task changes its state by it, that is put back; if it fails, the
    step of the line that fails alike will say so.
    """
    tensors, meta = snapshot(state.tensors()), state.meta()
    with contextlib.suppress(Exception):
        engine.rehearse(batch)
    if checksum(state.tensors(), state.meta()) != checksum(tensors, meta):
        state.load(tensors, meta)
