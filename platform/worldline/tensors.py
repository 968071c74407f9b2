"""Tensors as bytes, without copies where the memory allows. Imports nothing of ours."""

from __future__ import annotations

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order as they lie in memory; a view of the tensor if it is contiguous on the
    host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """As "float32"; `getattr(torch, name)` gives the dtype back."""
    return str(dtype).removeprefix("torch.")
