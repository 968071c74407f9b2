"""verify: bits, not values; only what both have."""

import math

import pytest

from worldline.tracking.verify import Difference, compare, first_difference


def step(number, **changes):
    same = {"loss": 0.5, "lr": 0.1, "grad_norm": 1.0, "rows": 8, "rows_digest": "r", "state_digest": None}
    return {"step": number} | same | changes


def test_equal_lines_of_different_length_are_equal_where_they_overlap():
    a = [step(k) for k in range(1, 11)]
    b = [step(k, state_digest="d") for k in range(5, 20)]
    result = compare(a, b)
    assert (result.num_a, result.num_b, result.num_common, result.num_digests) == (10, 15, 6, 0)
    assert result.difference is None


@pytest.mark.parametrize("field", ["loss", "lr", "grad_norm", "rows", "rows_digest", "state_digest"])
def test_the_first_differing_step_and_field_are_named(field):
    a = [step(k, state_digest="d") for k in range(1, 6)]
    b = [dict(s) for s in a]
    other = "x" if isinstance(a[0][field], str) else a[0][field] + 1
    b[2][field] = b[3]["loss"] = b[4]["rows"] = other
    found = first_difference(a, list(reversed(b)))
    assert found == Difference(3, field, a[2][field], other)
    assert f"step 3: {field}" in str(found)


def test_bits_decide():
    assert first_difference([step(1, loss=0.0)], [step(1, loss=-0.0)]) is not None
    assert first_difference([step(1, loss=0.1)], [step(1, loss=math.nextafter(0.1, 1))]) is not None
    assert first_difference([step(1, loss=math.nan)], [step(1, loss=math.nan)]) is None
    assert first_difference([step(1, loss=math.nan)], [step(1, loss=0.0)]) is not None


def test_a_digest_that_only_one_took_is_no_difference():
    assert first_difference([step(1, state_digest="d")], [step(1)]) is None


def test_nothing_in_common():
    assert compare([step(1)], [step(2)]).num_common == 0
