"""Copied beside a scenario's job file: tasks that stop where the scenario wants them to stop.

    gate            computes no step beyond the number in it
    gate-<pid>      the step this process waits to be allowed to compute
    hold-<place>    whoever comes to this place waits until the file is gone; where it holds pids, only these
    held-<place>-<pid>   this process waits there
    pids            every process that ever built a model

Nothing of the product knows of it; a task may compute as slowly as it likes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jobs.digits
import jobs.gpt
import torch

HERE = Path(__file__).parent
POLL_S = 0.005
DEADLINE_S = 200.0


class Paced:
    """Mixed in before a `worldline.Task`: each of its steps, and its evaluation, can be held from outside."""

    _open_until = -1

    def build_model(self) -> torch.nn.Module:
        append("pids", f"{os.getpid()}\n")
        hold("build")
        return super().build_model()

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        self._optimizer = super().build_optimizer(model)
        return self._optimizer

    def build_scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        self._scheduler = super().build_scheduler(optimizer)
        return self._scheduler

    def loss(self, model: torch.nn.Module, batch: dict[str, object]) -> object:
        if not rehearses():
            self.wait_at_gate()
        return super().loss(model, batch)

    def evaluate(self, model: torch.nn.Module, batch: dict[str, object]) -> object:
        hold("evaluate")
        return super().evaluate(model, batch)

    @property
    def step(self) -> int:
        """The step that is computed now."""
        if self._scheduler is not None:
            return self._scheduler.last_epoch + 1
        states = self._optimizer.state.values()
        return 1 + (int(next(iter(states))["step"]) if states else 0)

    def wait_at_gate(self) -> None:
        step = self.step
        if step > self._open_until:
            wait_while(lambda: self._read_gate() < step, f"gate-{os.getpid()}", str(step))

    def _read_gate(self) -> int:
        self._open_until = int((HERE / "gate").read_text())
        return self._open_until


class Gpt(Paced, jobs.gpt.Gpt):
    pass


class Digits(Paced, jobs.digits.Digits):
    pass


def rehearses() -> bool:
    """Whether whoever calls does so for the step that each process makes before it is a worker."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "rehearse":
        frame = frame.f_back
    return frame is not None


def is_first(what: str) -> bool:
    """Whether no process has asked for this before."""
    try:
        os.close(os.open(HERE / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hold(place: str) -> None:
    file = HERE / f"hold-{place}"

    def held() -> bool:
        try:
            pids = file.read_text().split()
        except FileNotFoundError:
            return False
        return not pids or str(os.getpid()) in pids

    wait_while(held, f"held-{place}-{os.getpid()}")


def wait_while(condition: Callable[[], bool], note: str, content: str = "") -> None:
    """Wait as long as the condition holds; the file `note` tells that this process does."""
    if condition():
        write(note, content)
    deadline = time.monotonic() + DEADLINE_S
    while condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the scenario forgot this process")
        time.sleep(POLL_S)


def write(name: str, content: str) -> None:
    temporary = HERE / f".{name}-{os.getpid()}"
    temporary.write_text(content)
    temporary.rename(HERE / name)


def append(name: str, content: str | bytes) -> None:
    """In one call, so that lines of several processes do not mix."""
    data = content.encode() if isinstance(content, str) else content
    descriptor = os.open(HERE / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, data)
    os.close(descriptor)
