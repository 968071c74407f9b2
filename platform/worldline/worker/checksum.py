"""A digest of the state that costs no more than reading it, on any device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from worldline.tensors import dtype_name
from worldline.worker.encoding import canonical_json

CHUNK_WORDS = 1 << 17


def checksum(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> str:
    """Equal for equal states, on whatever device; while training stands still for a newcomer, SHA-256 over
    all
    its bytes would be most of the wait.

    A Fletcher sum at heart: 64-bit words times odd numbers that count up, added modulo 2**64 a chunk, where
    neither order nor number of threads plays a part. It finds every single wrong word. It is no proof against
    intent: what is kept or compared over runs has `state.digest`.
    """
    sha = hashlib.sha256(canonical_json(meta))
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        sha.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(_sums(tensor.contiguous().view(-1).view(torch.uint8)))
    return sha.hexdigest()


def _sums(data: torch.Tensor) -> bytes:
    """The sum of each chunk, and the bytes behind the last whole word."""
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    weights = _weights(data.device)
    products = torch.empty_like(weights)

    def add(chunk: torch.Tensor) -> torch.Tensor:
        count = chunk.numel()
        return torch.mul(chunk, weights[:count], out=products[:count]).sum()

    sums = [add(chunk) for chunk in torch.split(words, CHUNK_WORDS)]
    return torch.stack(sums).cpu().numpy().tobytes() + data[whole:].cpu().numpy().tobytes()


@lru_cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(CHUNK_WORDS, device=device) * 2 + 1
