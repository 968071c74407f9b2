"""Handwritten digits with a small convolutional net and BatchNorm: the task of `digits.yaml`."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import worldline


def encode(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """image: 64 bytes, 0 to 16 each -> uint8 [rows, 8, 8]; label stays."""
    images = np.stack([np.frombuffer(image, dtype=np.uint8) for image in columns["image"]])
    return {"image": images.reshape(-1, 8, 8), "label": columns["label"]}


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Digits(worldline.Task):
    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        self.width, self.lr = width, lr

    def build_model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            block(1, width),
            block(width, 2 * width, stride=2),
            block(2 * width, 2 * width),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["label"])

    def evaluate(self, model: nn.Module, batch: worldline.Batch) -> dict[str, torch.Tensor]:
        logits, label = self.logits(model, batch), batch["label"]
        right = (logits.argmax(1) == label).float()
        return {"accuracy": right.mean(), "loss": F.cross_entropy(logits, label)}

    @staticmethod
    def logits(model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        return model(batch["image"].float().unsqueeze(1) / 16)
