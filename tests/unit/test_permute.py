import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.data.ledger import rows_digest
from worldline.data.permute import derive_key, mix, permutation

KEYS = st.integers(0, 2**64 - 1)


@given(KEYS, st.integers(0, 300))
def test_is_a_bijection(key: int, n: int) -> None:
    assert sorted(permutation(key, n).tolist()) == list(range(n))


@given(KEYS, KEYS)
def test_keys_give_different_orders(a: int, b: int) -> None:
    assert (permutation(a, 100).tolist() == permutation(b, 100).tolist()) == (a == b)


def test_mix_is_splitmix64() -> None:
    # The published first outputs of the generator for this seed.
    assert mix(1234567, 3).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_golden_values() -> None:
    """These must never change: runs resume on them."""
    assert derive_key("window", 1234, 0, 3, 7) == 503467753366021961
    assert permutation(42, 10).tolist() == [4, 1, 6, 2, 8, 3, 9, 0, 7, 5]
    assert permutation(0, 1).tolist() == [0]
    assert (
        hashlib.sha256(permutation(7, 100_000).tobytes()).hexdigest()
        == "58195501ef029f4a8c0ab6a8fd3095b20541f061e4b4900a26b0348798e3fc84"
    )
    assert rows_digest(np.arange(5)) == 2821693476514209883


@pytest.mark.parametrize(
    ("a", "b"), [((1, 23), (12, 3)), (("1",), (1,)), ((), (0,)), (("a", "b"), ("a,b",)), ((1, 2), (2, 1))]
)
def test_different_parts_give_different_keys(a: tuple[int | str, ...], b: tuple[int | str, ...]) -> None:
    assert derive_key(*a) != derive_key(*b)


def test_first_places_are_evenly_drawn() -> None:
    first = np.bincount([permutation(derive_key(i), 8)[0] for i in range(4000)], minlength=8)
    # 500 each; 3.5 standard deviations of a binomial are about 73.
    assert np.abs(first - 500).max() < 80


def test_rows_digest_depends_on_rows_and_order() -> None:
    digests = {rows_digest(np.array(rows, dtype=np.int64)) for rows in ([], [1], [1, 2], [2, 1], [1, 2, 0])}
    assert len(digests) == 5
    assert all(0 <= digest < 2**64 for digest in digests)
    assert rows_digest(np.arange(10)[::2]) == rows_digest(np.array([0, 2, 4, 6, 8]))
