"""State from peers: several members that hold it send it, in slices, to those that do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from worldline.collective.exchange import Gather
from worldline.collective.group import Group
from worldline.tensors import dtype_name

CHUNK_BYTES = 64 << 20
"""What is on its way at once; bounds the extra memory of a source."""

ALIGNMENT = 64


class Place(NamedTuple):
    """Where a tensor lies in the bytes of all, one behind the other, each begun at a multiple of
    ALIGNMENT.
    """

    name: str
    dtype: str
    shape: list[int]
    start: int
    stop: int


def transfer(
    group: Group,
    sources: Sequence[int],
    receivers: Sequence[int],
    tensors: Mapping[str, torch.Tensor],
    meta: dict[str, Any],
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Give the state of `sources` (all hold the same) to `receivers`.

    Every rank of the group calls it alike. tensors, meta: this rank's own state, used where it is a source.
    meanwhile: called once while bytes are on their way. Returns the received (tensors, meta) on receivers,
    None elsewhere. Each source sends an equal slice of every chunk to every receiver, so the load of a source
    shrinks with their number.
    """
    described = json.dumps([layout(tensors), meta]).encode() if group.rank == sources[0] else b""
    content, meta = json.loads(Gather(group, described, "state layout").finish()[sources[0]])
    places = [Place(*entry) for entry in content]
    size = places[-1].stop if places else 0
    receives = group.rank in receivers
    state = torch.empty(size if receives else 0, dtype=torch.uint8, device=group.device)
    flats = [_as_bytes(tensors[place.name]) for place in places] if group.rank in sources else []
    for first in range(0, size, CHUNK_BYTES):
        last = min(first + CHUNK_BYTES, size)
        slices = _slices(first, last, sources, group.size)
        start, stop = slices[group.rank]
        outgoing = _read(places, flats, start, stop, group.device)
        if len(receivers) > 1:
            outgoing = outgoing.repeat(len(receivers))
        pending = group.all_to_all(
            state[first:last] if receives else state,
            outgoing,
            [b - a if receives else 0 for a, b in slices],
            [stop - start if rank in receivers else 0 for rank in range(group.size)],
            lane=0,
            label=f"state bytes {first} to {last}",
        )
        if first == 0:
            meanwhile()
        group.wait(pending)
    return ({place.name: _view(state, place) for place in places}, meta) if receives else None


def layout(tensors: Mapping[str, torch.Tensor]) -> list[Place]:
    places = []
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        places.append(Place(name, dtype_name(tensor.dtype), list(tensor.shape), start, stop))
        start = -(-stop // ALIGNMENT) * ALIGNMENT
    return places


def _slices(first: int, last: int, sources: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Which bytes of [first, last) each rank sends; ranks that are no source send none."""
    cuts = [first + (last - first) * i // len(sources) for i in range(len(sources) + 1)]
    of_source = {rank: (cuts[i], cuts[i + 1]) for i, rank in enumerate(sources)}
    return [of_source.get(rank, (0, 0)) for rank in range(size)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _read(
    places: Sequence[Place], flats: Sequence[torch.Tensor], start: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Bytes [start, stop) of all tensors as they are laid out; what lies between two of them is arbitrary."""
    out = torch.empty(stop - start, dtype=torch.uint8, device=device)
    for place, flat in zip(places, flats, strict=False):
        low, high = max(place.start, start), min(place.stop, stop)
        if low < high:
            out[low - start : high - start].copy_(flat[low - place.start : high - place.start])
    return out


def _view(state: torch.Tensor, place: Place) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    return state[place.start : place.stop].view(dtype).view(place.shape)
