"""A small GPT over bytes: the task of `stdlib-gpt.yaml`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import worldline

VOCABULARY = 256  # a token is a byte


def encode(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """text: equally long byte strings -> tokens: uint8 [rows, length]."""
    rows = [np.frombuffer(text, dtype=np.uint8) for text in columns["text"]]
    return {"tokens": np.stack(rows)}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [rows, heads, length, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads), nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """Pre-norm decoder with learned positions; the output weights are the embedding's."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [rows, length], length at most the context -> logits [rows, length, 256]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


class Gpt(worldline.Task):
    """Next-byte prediction. A row is `context` + 1 bytes; `steps` is where the cosine reaches its floor."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.05,
        lr: float = 3e-3,
        warmup: int = 20,
        steps: int = 300,
    ) -> None:
        self.shape = {"layers": layers, "width": width, "heads": heads, "context": context}
        self.dropout = dropout
        self.lr, self.warmup, self.steps = lr, warmup, steps

    def build_model(self) -> nn.Module:
        return Model(**self.shape, dropout=self.dropout)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a tenth."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

    def loss(self, model: nn.Module, batch: worldline.Batch) -> torch.Tensor:
        tokens = batch["tokens"].long()
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
