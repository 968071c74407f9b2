"""Copied beside a scenario's job file: a small task with everything that usually breaks equality.

Dropout, BatchNorm, AdamW and a schedule. It writes down which rows it saw, and goes wrong where the file
`fault` says so.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time

import numpy as np
import paced
import ray
import torch
from torch import nn

import worldline

MANY_MIB = 8192
DEVICE_S = 20.0


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """Whoever saves or takes over the state passes here, and can be held."""

    def state_dict(self) -> dict[str, object]:
        paced.hold(f"state-{self.last_epoch}")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        if not paced.rehearses():
            paced.hold("load")
        super().load_state_dict(state)


class Net(worldline.Task):
    """norm: with BatchNorm, which cannot train on a single row. column: the target's name."""

    def __init__(self, width: int = 16, norm: bool = True, column: str = "y") -> None:
        self.width, self.norm, self.column = width, norm, column

    def build_model(self) -> nn.Module:
        wide = self.width
        norm = nn.BatchNorm1d(wide) if self.norm else nn.LayerNorm(wide)
        hidden = (nn.Linear(8, wide), norm, nn.ReLU(), nn.Dropout(0.2))
        return nn.Sequential(*hidden, nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return Schedule(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.99**step)

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch[self.column])

    def evaluate(self, model: nn.Module, batch: worldline.Batch) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch)}


class Tiny(paced.Paced, Net):
    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        if not model.training or paced.rehearses():
            return Net.loss(self, model, batch)
        self.wait_at_gate()
        ids = batch["id"].numpy()
        record = np.concatenate([np.array([self.step, len(ids)], np.int64), ids])
        paced.append(f"rows-{os.getpid()}", record.tobytes())
        return self.fault(ids) * Net.loss(self, model, batch)

    def fault(self, ids: np.ndarray) -> float:
        """`raise 7`: at step 7. `nan 7 12`: at step 7, in the micro-batch of row 12. `eat 7`: at step 7, more
        and more memory.
        """
        try:
            kind, step, *rows = (paced.HERE / "fault").read_text().split()
        except FileNotFoundError:
            return 1.0
        if self.step != int(step):
            return 1.0
        if kind == "raise":
            raise RuntimeError(f"this task does not like step {step}")
        if kind == "loop" and paced.is_first("looped"):
            self.loop()
        if kind == "eat":
            eaten = []
            while len(eaten) < MANY_MIB:
                eaten.append(np.ones(2**20, np.uint8))
            raise RuntimeError(f"nobody minded {MANY_MIB} MiB")
        return float("nan") if rows and int(rows[0]) in ids else 1.0

    def loop(self) -> None:
        while True:
            pass


class Peering(Tiny):
    """Exchanges something of its own after each step, and not always as it should."""

    def after_step(self, step: int, peers: worldline.Peers) -> None:
        kind, at, rank = "", 0, -1
        if (paced.HERE / "fault").exists():
            kind, *numbers = (paced.HERE / "fault").read_text().split()
            at, rank = map(int, numbers)
        names = ["one", "two"]
        if step == at and peers.rank == rank:
            names = ["two", "one"] if kind == "swap" else ["one"]
        for name in names:
            told = peers.gather(name, torch.full((2,), float(peers.rank)))
            assert [int(t[0]) for t in told] == list(range(peers.size))


class Parent(Tiny):
    """Each worker has a child that holds what only one process of a node can have: a device, say."""

    def build_model(self) -> nn.Module:
        path = paced.HERE / f"device-{ray.get_runtime_context().get_node_id()}"
        device = os.open(path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + DEVICE_S
        while True:
            try:
                fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the device is still taken after {DEVICE_S:g} s") from None
            time.sleep(paced.POLL_S)
        child = subprocess.Popen(["sleep", "1000"], pass_fds=[device])
        paced.append("pids", f"{child.pid}\n")
        os.close(device)
        return super().build_model()


class Headless(Tiny):
    def build_model(self) -> nn.Module:
        raise RuntimeError("there is no model today")


class Closure(Tiny):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())
