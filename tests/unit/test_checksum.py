"""The quick digest that members agree on: any change of the state changes it, nothing else does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldline.worker.checksum import CHUNK_WORDS, checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator).mul(9).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 4097, 2 * CHUNK_WORDS + 3])
def test_equal_states_have_equal_checksums(dtype, count) -> None:
    whole = numbers(count + 1, dtype)
    at_an_odd_offset, copy = whole[1:], whole[1:].clone()
    assert checksum({"a": at_an_odd_offset}, {}) == checksum({"a": copy}, {})


def test_threads_and_layout_play_no_part() -> None:
    tensor = numbers(3 * CHUNK_WORDS).view(3, -1)
    transposed = tensor.t().contiguous().t()
    before = torch.get_num_threads()
    sums = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums |= {checksum({"a": tensor}, {}), checksum({"a": transposed}, {})}
    torch.set_num_threads(before)
    assert len(sums) == 1


@given(st.integers(1, 3 * CHUNK_WORDS), st.data())
def test_a_single_bit_changes_it(count, data) -> None:
    tensor = numbers(count, torch.uint8)
    before = checksum({"a": tensor}, {})
    byte, bit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, 7))
    tensor[byte] ^= 1 << bit
    assert checksum({"a": tensor}, {}) != before


@given(st.data())
def test_elements_that_change_places_change_it(data) -> None:
    tensor = torch.arange(2 * CHUNK_WORDS + 5)
    before = checksum({"a": tensor}, {})
    index = st.integers(0, tensor.numel() - 1)
    a = data.draw(index)
    b = data.draw(index.filter(lambda i: i != a))
    tensor[[a, b]] = tensor[[b, a]]
    assert checksum({"a": tensor}, {}) != before


def test_names_shapes_dtypes_and_the_tree_count() -> None:
    tensor = numbers(24)
    states = [
        ({"a": tensor}, {}),
        ({"b": tensor}, {}),
        ({"a": tensor.view(4, 6)}, {}),
        ({"a": tensor.view(torch.int32)}, {}),
        ({"a": tensor}, {"step": 1}),
        ({"a": tensor, "b": tensor}, {}),
        ({"a": torch.cat([tensor, torch.zeros(2)])}, {}),
        ({"a": tensor[:12], "b": tensor[12:]}, {}),
    ]
    assert len({checksum(tensors, meta) for tensors, meta in states}) == len(states)
