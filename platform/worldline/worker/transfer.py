"""State from peers: several members that hold it send it, in slices, to those that do not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from worldline.collective.exchange import gather_bytes
from worldline.collective.group import Group

CHUNK_BYTES = 64 << 20
"""What is on its way at once; bounds the extra memory on both sides."""


def transfer(
    group: Group,
    sources: Sequence[int],
    receivers: Sequence[int],
    tensors: Mapping[str, torch.Tensor],
    meta: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Give the state of `sources` (all hold the same) to `receivers`.

    Every rank of the group calls it alike. tensors, meta: this rank's own state, used where it is a source.
    Returns the received (tensors, meta) on receivers, None elsewhere. Each source sends an equal slice of
    every chunk to every receiver, so the load of a source shrinks with their number.
    """
    described = _describe(tensors, meta) if group.rank == sources[0] else b""
    layout, meta = json.loads(gather_bytes(group, described, "state layout")[sources[0]])
    is_source, is_receiver = group.rank in sources, group.rank in receivers
    received = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        for name, dtype, shape in (layout if is_receiver else ())
    }
    holders = {name: tensors[name] for name, _, _ in layout} if is_source else received
    sizes = [_num_bytes(dtype, shape) for _, dtype, shape in layout]
    flats = [_as_bytes(tensor) for tensor in holders.values()]
    for start, stop in _chunks(sum(sizes)):
        cuts = _slices(stop - start, len(sources))
        chunk = torch.empty(stop - start, dtype=torch.uint8, device=group.device)
        if is_source:
            _copy(flats, sizes, start, chunk, gather=True)
        mine = _slice_of(cuts, sources, group.rank)
        outgoing = chunk[mine[0] : mine[1]].repeat(len(receivers))
        incoming = chunk if is_receiver else chunk[:0]
        pending = group.all_to_all(
            incoming,
            outgoing,
            [_length(cuts, sources, rank) if is_receiver else 0 for rank in range(group.size)],
            [mine[1] - mine[0] if rank in receivers else 0 for rank in range(group.size)],
            lane=0,
            label=f"state bytes {start}-{stop}",
        )
        group.wait(pending)
        if is_receiver:
            _copy(flats, sizes, start, chunk, gather=False)
    return (received, meta) if is_receiver else None


def _describe(tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> bytes:
    layout = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
    return json.dumps([layout, meta]).encode()


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel()) * int(getattr(torch, dtype).itemsize)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK_BYTES, total)) for start in range(0, total, CHUNK_BYTES))


def _slices(length: int, parts: int) -> list[tuple[int, int]]:
    return [(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def _slice_of(cuts: Sequence[tuple[int, int]], sources: Sequence[int], rank: int) -> tuple[int, int]:
    return cuts[sources.index(rank)] if rank in sources else (0, 0)


def _length(cuts: Sequence[tuple[int, int]], sources: Sequence[int], rank: int) -> int:
    start, stop = _slice_of(cuts, sources, rank)
    return stop - start


def _copy(
    flats: Sequence[torch.Tensor], sizes: Sequence[int], start: int, chunk: torch.Tensor, *, gather: bool
) -> None:
    """Copy between the chunk, which begins at byte `start` of all tensors laid end to end, and the
    tensors.
    """
    offset = 0
    for flat, size in zip(flats, sizes, strict=True):
        low, high = max(offset, start), min(offset + size, start + len(chunk))
        if low < high:
            inside, outside = chunk[low - start : high - start], flat[low - offset : high - offset]
            if gather:
                inside.copy_(outside)
            else:
                outside.copy_(inside)
        offset += size
