"""The benchmarks' model: an MLP of about a million parameters with everything that usually breaks
equality.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import worldline

WIDTH = 64


class Mlp(worldline.Task):
    """hidden: 640 gives 0.95 million parameters. pause_s: what a micro-batch takes beyond its computation."""

    def __init__(self, hidden: int = 640, dropout: float = 0.1, pause_s: float = 0.0) -> None:
        self.hidden = hidden
        self.dropout = dropout
        self.pause_s = pause_s

    def build_model(self) -> nn.Module:
        def block(inputs: int) -> list[nn.Module]:
            return [nn.Linear(inputs, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]

        return nn.Sequential(
            *block(WIDTH), *block(self.hidden), *block(self.hidden), nn.Linear(self.hidden, 1)
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        return nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
