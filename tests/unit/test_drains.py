"""Drains are posted once each; their deadlines, by another machine's clock, are not taken at their word."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.control import drains
from worldline.control.drains import LONGEST_S, SHORTEST_S, ApiMoved, Drains, NodeDraining, time_left

NOW_S = 1_700_000_000.0


class Ray:
    """Says which nodes are draining, or raises."""

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        self.error: Exception | None = None
        self.asked = threading.Semaphore(0)

    def __call__(self) -> dict[str, int]:
        self.asked.release()
        if self.error is not None:
            raise self.error
        return self.nodes


def in_ms(seconds: float) -> int:
    return int((NOW_S + seconds) * 1000)


def test_each_drain_is_posted_once():
    posted = []
    ray = Ray()
    watch = Drains(posted.append, ray, lambda: NOW_S)
    watch.look()
    ray.nodes = {"a" * 56: in_ms(20)}
    watch.look()
    watch.look()
    assert posted == [NodeDraining("a" * 56, 20, "Ray drains node aaaaaaaa")]
    ray.nodes = {"b" * 56: 0, **ray.nodes}
    watch.look()
    assert posted[1:] == [NodeDraining("b" * 56, LONGEST_S, "Ray drains node bbbbbbbb")]
    ray.nodes = {"a" * 56: in_ms(10)}
    watch.look()
    assert posted[2:] == [NodeDraining("a" * 56, 10, "Ray drains node aaaaaaaa")]


def test_the_watch_goes_on_when_ray_does_not_answer(monkeypatch):
    monkeypatch.setattr(drains, "POLL_S", 0.01)
    came = threading.Event()
    ray = Ray()
    ray.error = ConnectionError("no GCS")
    with Drains(lambda _: came.set(), ray):
        assert all(ray.asked.acquire(timeout=20) for _ in range(3))
        ray.nodes = {"a" * 56: in_ms(20)}
        ray.error = None
        assert came.wait(20)


@given(deadline_ms=st.integers(min_value=-(2**63), max_value=2**63 - 1), now_s=st.floats(0, 1e10))
def test_whatever_the_clocks_say_the_time_is_a_sensible_one(deadline_ms, now_s):
    assert SHORTEST_S <= time_left(deadline_ms, now_s) <= LONGEST_S


@given(lead_s=st.floats(SHORTEST_S, LONGEST_S))
def test_among_clocks_that_agree_it_is_what_was_said(lead_s):
    assert time_left(in_ms(lead_s), NOW_S) == pytest.approx(lead_s, abs=0.002)


@pytest.mark.parametrize("skew_s", [-900, 900])
def test_a_clock_that_is_wrong_neither_ends_a_node_at_once_nor_lets_it_stay(skew_s):
    assert time_left(in_ms(20 + skew_s), NOW_S) in (SHORTEST_S, LONGEST_S)


def test_this_version_of_ray_has_the_names():
    from ray._raylet import InnerGcsClient
    from ray.core.generated import autoscaler_pb2

    assert callable(drains._asker())
    assert callable(InnerGcsClient.drain_node)
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    assert reason == drains.PREEMPTION


def test_a_version_of_ray_without_them_is_told_apart(monkeypatch):
    from ray._private.state import GlobalState

    monkeypatch.delattr(GlobalState, "get_draining_nodes")
    with pytest.raises(ApiMoved, match=r"state\.get_draining_nodes.*control/drains\.py"):
        Drains(lambda _: None)
