"""The task's loss of one micro-batch, checked, as a sum with its weight."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from worldline.data.loader import MicroBatch
from worldline.task import Loss, Task


class Forward:
    """Calls `task.loss` on the device, in bf16 where that is asked for.

    A plain tensor counts as the mean over the micro-batch's rows. Raises TypeError for anything that is no
    loss.
    """

    def __init__(self, task: Task, model: torch.nn.Module, device: torch.device, bf16: bool) -> None:
        self._task = task
        self._model = model
        self._device = device
        self._bf16 = bf16

    def __call__(self, batch: MicroBatch) -> Loss:
        columns = {name: _to(value, self._device) for name, value in batch.columns.items()}
        with self._autocast():
            result = self._task.loss(self._model, columns)
        if isinstance(result, Loss):
            return result
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise TypeError(
                f"{type(self._task).__name__}.loss must return a scalar tensor or a worldline.Loss, "
                f"not {type(result).__name__}{list(getattr(result, 'shape', []))}"
            )
        rows = len(batch.row_ids)
        # A loss in bf16 could not hold the product.
        return Loss(result.to(torch.promote_types(result.dtype, torch.float32)) * rows, rows)

    def _autocast(self) -> AbstractContextManager[object]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)


def _to(value: object, device: torch.device) -> object:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
