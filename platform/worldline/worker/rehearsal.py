"""A step for nothing, before a worker is offered, so that nobody waits long for its first one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from worldline.data.loader import MicroBatch
from worldline.worker.checksum import checksum
from worldline.worker.engine import Engine
from worldline.worker.state import TrainState, snapshot


def rehearse(engine: Engine, state: TrainState, batch: MicroBatch) -> None:
    """One step on `batch` alone, after which the state is put back.

    What first calls cost (libraries that load, kernels that are chosen or compiled, memory that grows) is
    paid here, while the others train. If the task fails, the step of the line that fails alike will say so.
    Raises RuntimeError where what `state_dict` shows is not as it was.
    """
    tensors, meta = snapshot(state.tensors()), state.meta()
    with contextlib.suppress(Exception), passing_buffers_kept(engine.model):
        engine.rehearse(batch)
    state.load(tensors, meta)
    if checksum(state.tensors(), state.meta()) != checksum(tensors, meta):
        raise RuntimeError(
            "the state of the model, optimizer or scheduler cannot be put back after a step: all that a step "
            "changes in them must be in their state_dict"
        )


@contextlib.contextmanager
def passing_buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards the buffers that are no part of the state, too, are what they were before."""
    before = [
        (module, key, None if buffer is None else buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if key in module._non_persistent_buffers_set
    ]
    try:
        yield
    finally:
        for module, key, buffer in before:
            module._buffers[key] = buffer
