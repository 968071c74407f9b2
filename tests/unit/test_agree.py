"""Members say alike in what they differ."""

import pytest
from tests.unit.ranks import everywhere, form, kill_self, new_prefix, peers, until

from worldline.collective.group import CollectiveFailed
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
    assert not agreement.reached()
    return str(caught.value)


def claim_alike(room, rank, size, prefix):
    agreement = Agreement(form(room, rank, size, prefix), {"step": "3"})
    until(agreement.reached)
    agreement.finish()
    return agreement.reached()


def claim_in_vain(room, rank, size, prefix):
    group = form(room, rank, size, prefix)
    if rank == 1:
        kill_self()
    agreement = Agreement(group, {"step": "3"})
    with pytest.raises(CollectiveFailed):
        agreement.finish()
    return agreement.reached()


def test_it_is_reached_when_all_have_said_the_same_and_not_before():
    with peers(3) as ranks:
        assert everywhere(ranks, claim_alike) == [True] * 3
    with peers(2) as (one, other):
        prefix = new_prefix()
        other.start(claim_in_vain, 1, 2, prefix)
        assert one.call(claim_in_vain, 0, 2, prefix) is False


def test_all_raise_the_same():
    claims = [{"step": "3" * 1000}, {"step": "3" * 1000}, {"step": "4"}]
    with peers(3) as ranks:
        said = everywhere(ranks, claim, claims)
    assert said == [first_difference(claims)] * 3
