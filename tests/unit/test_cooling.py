"""Nodes whose workers do not last get no new one for a while."""

from hypothesis import given
from hypothesis import strategies as st

from worldline.control.cooling import FREE, LONGEST_S, SHORTEST_S, Cooling

times = st.lists(st.floats(0, 100), min_size=1, max_size=30)


def strike(times):
    cooling, now = Cooling(), 0.0
    for pause in times:
        now += pause
        cooling = cooling.struck("a", now)
    return cooling, now


def test_the_first_failures_cost_nothing_then_each_twice_as_much():
    cooling = Cooling()
    for _ in range(int(FREE)):
        cooling = cooling.struck("a", 10.0)
        assert cooling.avoided(10.0) == frozenset()
    for seconds in (SHORTEST_S, 2 * SHORTEST_S, 4 * SHORTEST_S):
        cooling = cooling.struck("a", 10.0)
        assert cooling.avoided(10.0 + seconds - 0.1) == {"a"}
        assert cooling.avoided(10.0 + seconds) == frozenset()


def test_strikes_are_forgiven_with_time_and_count_by_node():
    cooling = Cooling()
    for _ in range(3):
        cooling = cooling.struck("a", 0.0).struck("b", 0.0)
    assert cooling.struck("a", 60.0).avoided(60.0) == frozenset()
    assert cooling.struck("a", 1.0).avoided(1.0) == {"a"}


def test_a_closed_node_stays_closed():
    assert Cooling().close("a").struck("b", 0.0).avoided(1e9) == {"a"}


@given(times, st.floats(0, 1000))
def test_every_cool_down_ends(times, later):
    cooling, now = strike(times)
    assert cooling.avoided(now + LONGEST_S) == frozenset()
    if cooling.avoided(now + later):
        assert cooling.avoided(now + later / 2), "who cools at a time cooled all the way"


@given(times)
def test_one_more_failure_never_shortens_it(times):
    cooling, now = strike(times)
    for later in (0.0, 1.0, 10.0, 100.0):
        assert cooling.avoided(now + later) <= cooling.struck("a", now).avoided(now + later)
