"""Who is in what state: the ways between requested, standby, member and out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.control.member import Drain, MemberState, Suspicion
from worldline.control.membership import Membership
from worldline.worker.orders import EndKind, GenerationEnd, Hello
from worldline.world import Position

HELLO = Hello(1, "node", "10.0.0.1", {"torch": "2"})


def standing_by(*ids):
    membership = Membership()
    for id in ids:
        membership = membership.requested(id, 0.0).ready(id, HELLO, 1.0)
    return membership


def training(*ids):
    return standing_by(*ids).formed(ids, Position(0), 2.0)


def end(kind=EndKind.BROKEN, generation=1, step=3, reason="peer gone"):
    return GenerationEnd(kind, generation, Position(step), reason)


def states(membership):
    return {id: member.state for id, member in membership.members.items()}


def test_the_way_of_a_worker():
    membership = Membership().requested("a", 0.0)
    assert states(membership) == {"a": MemberState.REQUESTED}
    membership = membership.ready("a", HELLO, 1.0)
    assert states(membership) == {"a": MemberState.STANDBY}
    assert membership.members["a"].since == 1.0
    membership = membership.formed(["a"], Position(7), 2.0)
    assert states(membership) == {"a": MemberState.MEMBER}
    assert (membership.generation, membership.position) == (1, Position(7))
    assert membership.out("a", "died").members == {}


def test_a_worker_is_requested_once():
    with pytest.raises(ValueError, match="requested before"):
        Membership().requested("a", 0.0).requested("a", 1.0)


def test_who_is_out_stays_out():
    gone = standing_by("a", "b").out("b", "died")
    assert gone.ready("b", HELLO, 5.0) is gone
    assert gone.out("b", "again") is gone
    assert gone.ended({"b": end()}) == gone


def test_ranks_are_the_order_given_and_members_come_by_rank():
    membership = standing_by("a", "b", "c").formed(["c", "a"], Position(0), 2.0)
    assert [(m.id, m.rank) for m in membership.current] == [("c", 0), ("a", 1)]
    assert [m.id for m in membership.in_state(MemberState.STANDBY)] == ["b"]


def test_a_lost_member_is_trouble_and_is_counted():
    membership = training("a", "b").out("b", "is gone")
    assert membership.trouble == "rank 1 is gone"
    assert membership.lost == 1
    assert [m.id for m in membership.training] == ["a"]


def test_a_lost_standby_is_no_trouble():
    membership = training("a").requested("b", 3.0).ready("b", HELLO, 3.0).out("b", "is gone")
    assert membership.trouble == ""
    assert membership.lost == 0


def test_the_first_trouble_is_the_one_that_is_told():
    membership = training("a", "b", "c").out("c", "is gone").ended({"a": end(reason="peer gone")})
    assert membership.trouble == "rank 2 is gone"


@pytest.mark.parametrize("kind", [EndKind.HALTED, EndKind.FINISHED])
def test_an_end_in_order_is_no_trouble(kind):
    membership = training("a", "b").ended({"a": end(kind)})
    assert membership.trouble == ""
    assert membership.members["a"].position == Position(3)
    assert membership.out("a", "died later").trouble == ""


def test_an_end_counts_once_and_only_for_its_generation():
    membership = training("a")
    assert membership.ended({"a": end(generation=2)}) == membership
    ended = membership.ended({"a": end(step=3)})
    assert ended.ended({"a": end(step=4)}) == ended
    assert ended.members["a"].position == Position(3)


def test_a_new_generation_waits_for_who_still_trains_and_for_who_is_not_ready():
    with pytest.raises(ValueError, match="still trains in generation 1"):
        training("a", "b").ended({"a": end()}).formed(["a"], Position(3), 4.0)
    with pytest.raises(ValueError, match="not ready"):
        Membership().requested("a", 0.0).formed(["a"], Position(0), 1.0)


def test_a_new_generation_begins_with_a_clean_slate():
    before = training("a", "b").asked_to_halt(3.0).out("b", "gone").asked_to_abandon(["a"], "b", 4.0)
    after = before.ended({"a": end()}).formed(["a"], Position(3), 6.0)
    assert (after.generation, after.trouble, after.lost, after.halting) == (2, "", 0, None)
    member = after.members["a"]
    assert (member.end, member.asked, member.since) == (None, None, 2.0)


def test_a_member_left_out_is_a_standby_again():
    membership = training("a", "b").ended({"a": end()}).ended({"b": end()}).formed(["a"], Position(3), 6.0)
    assert states(membership) == {"a": MemberState.MEMBER, "b": MemberState.STANDBY}
    assert membership.members["b"].position is None


def test_the_generation_moves_when_any_member_does_and_then_nothing_need_be_looked_into():
    membership = training("a", "b").inquired(["a", "b"], 9.0)
    assert (membership.furthest, membership.moved) == (Position(0), 2.0)
    told = membership.described("a", None).described("c", None)
    assert told.inquiry.answers == {"a": None}
    assert not told.inquiry.complete
    assert told.described("b", None).inquiry.complete
    moved = told.came_to(Position(4), 9.5)
    assert (moved.furthest, moved.moved, moved.inquiry) == (Position(4), 9.5, None)
    assert moved.came_to(Position(4), 11.0) is moved.came_to(Position(3), 11.0) is moved


def test_an_earlier_deadline_stays():
    soon, late = Drain(3.0, 10.0, "soon"), Drain(4.0, 60.0, "late")
    membership = training("a", "b")
    assert membership.draining(["a"], late).draining(["a"], soon).members["a"].drain == soon
    assert membership.draining(["a"], soon).draining(["a"], late).members["a"].drain == soon
    assert membership.draining(["a"], soon).members["b"].drain is None


def test_a_suspicion_stays_until_it_is_cleared():
    first, second = Suspicion(5.0, "first"), Suspicion(9.0, "second")
    membership = training("a").suspected("a", first)
    assert membership.suspected("a", second) == membership
    assert membership.cleared("a").members["a"].suspicion is None


def test_a_call_that_failed_is_not_mended_by_a_sign_of_life():
    silent, failed = Suspicion(9.0, "silent", silent=True), Suspicion(7.0, "failed", final=True)
    for first, second in ((silent, failed), (failed, silent)):
        both = training("a").suspected("a", first).suspected("a", second)
        assert both.members["a"].suspicion == Suspicion(7.0, first.reason, silent=True, final=True)
        assert both.cleared("a").members["a"].suspicion == Suspicion(7.0, first.reason, final=True)


def test_who_is_heard_again_is_asked_with_the_others():
    asked = training("a", "b").suspected("a", Suspicion(9.0, "silent", silent=True)).inquired(["b"], 5.0)
    assert asked.cleared("a").inquiry is None
    assert asked.cleared("b").inquiry is not None


@given(st.permutations(["a", "b", "c", "d"]), st.integers(1, 4))
def test_any_ready_workers_in_any_order(order, size):
    chosen = order[:size]
    membership = standing_by("a", "b", "c", "d").formed(chosen, Position(0), 2.0)
    assert [m.id for m in membership.current] == chosen
    assert [m.rank for m in membership.current] == list(range(size))
