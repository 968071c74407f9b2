"""State from peers: what receivers get is what the sources hold, byte for byte."""

import pytest
import torch
from tests.unit.ranks import everywhere, form, peers

from worldline.worker import transfer as transfer_module
from worldline.worker.state import digest
from worldline.worker.transfer import transfer


def state():
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "weight": torch.randn(33, 7, generator=generator),
        "turned": torch.randn(5, 6, generator=generator).t(),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "double": torch.tensor(float("nan"), dtype=torch.float64),
        "complex": torch.randn(2, generator=generator, dtype=torch.complex64),
        "flags": torch.tensor([True, False, True]),
        "steps": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    return tensors, {"lr": 0.1 + 0.2, "text": "läuft", "deep": [1, {"a": None}]}


def receive(room, rank, size, prefix, sources, receivers, chunk_bytes):
    """The digest of what came; whether anything came; how often `meanwhile` was called."""
    transfer_module.CHUNK_BYTES = chunk_bytes
    group = form(room, rank, size, prefix)
    tensors, meta = state() if rank in sources else ({}, {})
    called = []
    got = transfer(group, sources, receivers, tensors, meta, lambda: called.append(rank))
    if got is None:
        return None, called
    received, meta = got
    for name, tensor in state()[0].items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        received[name].view(-1)[:0]  # what was received can be viewed flat
    return digest(received, meta), called


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 100])
def test_receivers_get_what_the_sources_hold(chunk_bytes):
    expected = digest(*state())
    with peers(4) as ranks:
        for sources, receivers in (
            ((0,), (1,)),
            ((1,), (0, 2)),
            ((0, 2), (1, 3)),
            ((0, 1, 3), (2,)),
            ((1, 2), (0,)),
        ):
            size = max(*sources, *receivers) + 1
            results = everywhere(ranks[:size], receive, sources, receivers, chunk_bytes)
            assert results == [(expected if rank in receivers else None, [rank]) for rank in range(size)]
