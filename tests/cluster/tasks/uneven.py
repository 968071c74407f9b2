"""Copied beside a scenario's job file: the tiny task where one process, or one row, is not like the others.

role-<pid>          what this process tells of its own: `a`, `b`, or `even`, which says nothing in odd steps
memory              `7 <pid>`: this process has no memory left at step 7; once, as the file goes with it
flip                `7 <pid>`: a bit of this process's weights turns at step 7; once
threads             so many threads does whoever builds a model now take, against the job's word
buffers             `<step> <pid> <before> <after>`: the buffers around the first micro-batch of a shard
hold-micro-7-2      this process waits in the middle of its second micro-batch of step 7
"""

from __future__ import annotations

import hashlib
import os

import paced
import tiny
import torch
from torch import nn

import worldline

NO_GRADIENT = worldline.Loss(torch.zeros((), requires_grad=True), 0.0)
"""What a task may return for rows that it leaves out: they weigh nothing."""


class Uneven(tiny.Tiny):
    _counted = (0, 0)

    def build_model(self) -> nn.Module:
        self._model = super().build_model()
        if (threads := read("threads")) is not None:
            torch.set_num_threads(int(threads))
        return self._model

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor | worldline.Loss:
        if not model.training or paced.rehearses():
            return super().loss(model, batch)
        self.wait_at_gate()
        before, is_first = self._buffers(), int(model[1].num_batches_tracked) % 2 == 0 if self.norm else False
        result = super().loss(model, batch)
        if is_first:
            paced.append("buffers", f"{self.step} {os.getpid()} {before} {self._buffers()}\n")
        paced.hold(f"micro-{self.step}-{self._count()}")
        rows = len(batch["id"])
        return worldline.Loss(result * rows, rows, self._metrics())

    def fault(self, ids: object) -> float:
        if self._befalls("memory"):
            raise MemoryError("no memory left")
        if self._befalls("flip"):
            weight = next(self._model.parameters()).detach().view(torch.int32)
            weight.view(-1)[:1].bitwise_xor_(1)
        return 1.0

    def _befalls(self, what: str) -> bool:
        if read(what) != f"{self.step} {os.getpid()}":
            return False
        (paced.HERE / what).unlink()
        return True

    def _metrics(self) -> dict[str, float]:
        role = read(f"role-{os.getpid()}")
        if role is None or (role == "even" and self.step % 2):
            return {}
        return {role: {"a": 1.0, "b": 2.0, "even": 3.0}[role]}

    def _buffers(self) -> str:
        buffers = [buffer.numpy().tobytes() for buffer in self._model.buffers()]
        return hashlib.sha256(b"".join(buffers)).hexdigest()

    def _count(self) -> int:
        """How many micro-batches of the step this process has computed."""
        step, count = self._counted
        self._counted = (self.step, count + 1 if step == self.step else 1)
        return self._counted[1]


class Careless(tiny.Tiny):
    """Goes on where memory runs out: at step 7, in the micro-batch of the row that file `greedy` names."""

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor | worldline.Loss:
        try:
            return super().loss(model, batch)
        except MemoryError:
            return NO_GRADIENT

    def fault(self, ids: object) -> float:
        greedy = read("greedy")
        if greedy is not None and self.step == 7 and int(greedy) in ids:
            raise MemoryError("no memory left")
        return 1.0


def read(name: str) -> str | None:
    try:
        return (paced.HERE / name).read_text()
    except FileNotFoundError:
        return None
