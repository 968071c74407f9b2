"""The benchmarks' model: an MLP of about a million parameters with everything that usually breaks
equality.
"""

from __future__ import annotations

import torch
from torch import nn

import worldline

WIDTH = 64


class Mlp(worldline.Task):
    """hidden: 640 gives 0.95 million parameters."""

    def __init__(self, hidden: int = 640, dropout: float = 0.1) -> None:
        self.hidden = hidden
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        def block(inputs: int) -> list[nn.Module]:
            return [nn.Linear(inputs, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]

        return nn.Sequential(
            *block(WIDTH), *block(self.hidden), *block(self.hidden), nn.Linear(self.hidden, 1)
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
