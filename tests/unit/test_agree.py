"""Members say alike in what they differ."""

import pytest
from tests.unit.ranks import everywhere, form, peers

from worldline.worker.agree import Agreement, Disagreed, first_difference


def test_the_first_name_that_differs_is_told_with_who_says_what():
    same = {"plan": "p", "step": "3"}
    assert first_difference([same, same]) == ""
    assert first_difference([same, same | {"step": "4"}, same]) == (
        "the members differ in step: rank 0, 2: 3; rank 1: 4"
    )
    assert first_difference([same, {"plan": "q", "step": "4"}]).startswith("the members differ in plan: ")


def test_a_name_is_compared_among_those_who_claim_something_for_it():
    assert first_difference([{"step": "3"}, {"step": "3", "digest": "d"}, {"digest": "d"}]) == ""
    assert first_difference([{"step": "3"}, {"digest": "d"}, {"digest": "e"}]) == (
        "the members differ in digest: rank 1: d; rank 2: e"
    )


def test_alone_there_is_nobody_to_differ_from():
    Agreement(None, {"step": "3"}).finish()


def claim(room, rank, size, prefix, claims):
    agreement = Agreement(form(room, rank, size, prefix), claims[rank])
    with pytest.raises(Disagreed) as caught:
        agreement.finish()
    agreement.finish()
    return str(caught.value)


def test_all_raise_the_same():
    claims = [{"step": "3" * 1000}, {"step": "3" * 1000}, {"step": "4"}]
    with peers(3) as ranks:
        said = everywhere(ranks, claim, claims)
    assert said == [first_difference(claims)] * 3
