"""Fault scripts: what is wrong in one is said, what comes of one depends on its seed and the run alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.control.chaos import Kind, Script, load_script
from worldline.control.injector import Injector
from worldline.control.schedule import Fault, schedule
from worldline.control.signals import DrainRequested, Resize
from worldline.job.faults import JobError

RANKS = {0: "w1", 1: "w4", 2: "w3"}
EVERY = {"every_s": [2, 10]}


def script(**content: Any) -> Script:
    return Script.model_validate(content)


def listed(*faults: dict[str, Any]):
    return schedule(script(faults=faults), 1, 4)


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        ({}, ["it: give either faults, one at least, or random"]),
        ({"faults": []}, ["it: give either faults, one at least, or random"]),
        ({"fault": [], "random": EVERY}, ["fault: unknown key; did you mean 'faults'?"]),
        (
            {"faults": [{"at_step": 1, "kil": 0}, {"at_step": 2, "kill": -1}, {"at_s": 1, "stop": True}]},
            [
                "faults[0].kil: unknown key; did you mean 'faults[0].kill'?",
                "faults[1].kill: expected a rank or any, found -1",
                "faults[2].stop: expected a rank or any, found True",
            ],
        ),
        (
            {"faults": [{"kill": 0}, {"at_step": 2}, {"at_s": 1, "kill": 0, "lead_s": 2}]},
            [
                "faults[0]: give exactly one of at_step and at_s",
                "faults[1]: give exactly one of kill, stop, drain, add, remove",
                "faults[2]: lead_s goes with drain",
            ],
        ),
        (
            {"random": {"every_s": [3, 2], "kinds": ["kill", "explode"]}},
            [
                "random.every_s: expected [from, to], two numbers of seconds above 0, found [3, 2]",
                "random.kinds[1]: expected 'kill', 'stop', 'drain', 'add' or 'remove', found 'explode'",
            ],
        ),
        ({"random": {}}, ["random.every_s: expected a value, found none; this key is required"]),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: object, faults: list[str]) -> None:
    path = tmp_path / "chaos.yaml"
    path.write_text(json.dumps(content))
    with pytest.raises(JobError) as caught:
        load_script(path)
    assert [fault.removeprefix(f"{path}: ") for fault in caught.value.faults] == faults


def test_the_example_in_the_description_is_one(tmp_path: Path) -> None:
    import worldline.control.chaos as chaos

    assert chaos.__doc__ is not None
    blocks = [block for block in chaos.__doc__.split("\n\n") if block.startswith("    ")]
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "chaos.yaml").write_text(block)
        load_script(tmp_path / "chaos.yaml")


def test_each_listed_fault_comes_once_when_its_time_has_come() -> None:
    faults = listed(
        {"at_step": 5, "kill": 1},
        {"at_s": 10, "stop": 0, "resume_s": 2},
        {"at_step": 7, "drain": 2, "lead_s": 3},
        {"at_step": 7, "add": 2},
        {"at_step": 8, "remove": 1},
    )
    assert faults.due(0, 100.0, {}, 3) == []  # nobody trains yet
    assert faults.due(0, 200.0, RANKS, 3) == []
    assert faults.due(6, 201.0, RANKS, 3) == [Fault(Kind.KILL, "w4", 1)]
    assert faults.due(6, 209.9, RANKS, 3) == []
    assert faults.due(6, 210.0, RANKS, 3) == [Fault(Kind.STOP, "w1", 0, resume_s=2.0)]
    assert faults.due(8, 211.0, RANKS, 3) == [
        Fault(Kind.DRAIN, "w3", 2, lead_s=3.0),
        Fault(Kind.ADD, num=2),
        Fault(Kind.REMOVE, num=-1),
    ]
    assert faults.due(100, 1000.0, RANKS, 3) == []


def test_what_an_earlier_attempt_has_had_does_not_come_again() -> None:
    faults = listed({"at_step": 5, "kill": 0}, {"at_step": 6, "kill": 0})
    assert faults.due(5, 0.0, RANKS, 3) == []
    assert faults.due(6, 1.0, RANKS, 3) == [Fault(Kind.KILL, "w1", 0)]


def test_a_fault_whose_rank_is_not_there_is_missed_and_said_so() -> None:
    faults = listed({"at_step": 1, "kill": 3}, {"at_step": 2, "drain": "any"})
    assert faults.due(0, 0.0, RANKS, 3) == []
    assert [str(fault) for fault in faults.due(2, 0.0, {}, 3)] == [
        "no kill: there is no rank 3",
        "no drain: there is no member that is well",
    ]


def test_any_is_nobody_whom_a_fault_befell_already() -> None:
    faults = listed(*({"at_step": step, "kill": "any"} for step in (1, 2, 3, 4)))
    faults.due(0, 0.0, RANKS, 3)
    hit = [faults.due(step, 0.0, RANKS, 3)[0] for step in (1, 2, 3, 4)]
    assert {fault.worker for fault in hit[:3]} == set(RANKS.values())
    assert hit[3].missed


worlds = st.lists(
    st.tuples(st.sets(st.integers(1, 9), max_size=5), st.integers(1, 4), st.floats(0, 20)),
    min_size=1,
    max_size=60,
)


@given(st.integers(0, 2**32), worlds, st.integers(0, 2), st.sets(st.sampled_from(list(Kind)), min_size=1))
def test_chance_keeps_to_its_limits_and_to_its_seed(seed, worlds, leave, kinds) -> None:
    spec = {"seed": seed, "every_s": [2, 5], "leave": leave, "kinds": sorted(kinds)}
    first, second = (schedule(script(random=spec), 1, 4) for _ in range(2))
    now, last, harmed = 0.0, None, set[str]()
    for ids, wanted, passes in worlds:
        now += passes
        ranks = {rank: f"w{id}" for rank, id in enumerate(sorted(ids))}
        harmed &= set(ranks.values())
        found = first.due(0, now, ranks, wanted)
        assert found == second.due(0, now, ranks, wanted)
        assert len(found) <= 1
        for fault in found:
            assert last is None or now - last >= 2
            last = now
            assert fault.kind in kinds
            assert 1 <= wanted + fault.num <= 4
            if fault.num == 0:
                assert ranks[fault.rank] == fault.worker
                assert fault.worker not in harmed
                harmed.add(fault.worker)
                assert len(set(ranks.values()) - harmed) >= leave


def test_chance_ends_when_it_is_told_to() -> None:
    by_step = schedule(script(random={"every_s": [1, 1], "until_step": 50}), 1, 4)
    by_time = schedule(script(random={"every_s": [1, 1], "for_s": 50}), 1, 4)
    for each in (by_step, by_time):
        hit = [now for now in range(100) if each.due(now, float(now), {0: "w1", 1: f"x{now}"}, 2)]
        assert len(hit) > 20
        assert max(hit) < 50


def test_chance_picks_every_kind_and_every_rank() -> None:
    faults = schedule(script(random={"seed": 3, **EVERY}), 1, 4)
    seen: Counter[Kind] = Counter()
    hit: Counter[int] = Counter()
    wanted = 4
    for now in range(0, 4000, 5):
        # Whoever was harmed is replaced before the next fault.
        for fault in faults.due(now, float(now), {rank: f"w{now}-{rank}" for rank in range(4)}, wanted):
            seen[fault.kind] += 1
            hit[fault.rank] += 1
            wanted += fault.num
    assert seen.keys() == set(Kind)
    assert hit.keys() >= {0, 1, 2, 3}
    assert sum(seen.values()) > 300


def test_the_injector_does_what_is_due() -> None:
    done: list[object] = []
    notes: list[str] = []
    faults = listed(
        {"at_step": 1, "kill": 0},
        {"at_step": 1, "stop": 1, "resume_s": 0.5},
        {"at_step": 1, "drain": 2, "lead_s": 4},
        {"at_step": 1, "remove": 2},
        {"at_step": 1, "add": 1},
        {"at_step": 1, "kill": 7},
    )
    injector = Injector(
        faults,
        harm=lambda *order: done.append(order),
        post=done.append,
        note=lambda text, workers: notes.append(f"{text} {list(workers)}"),
    )
    injector.strike(0, 0.0, RANKS, 4)
    assert done == []
    injector.strike(1, 0.1, RANKS, 4)
    killed, stopped, drained, smaller, larger = done
    assert killed == ("w1", signal.SIGKILL, None)
    assert stopped == ("w4", signal.SIGSTOP, 0.5)
    assert isinstance(drained, DrainRequested)
    assert (drained.target, drained.lead_s) == ("w3", 4.0)
    assert isinstance(smaller, Resize)
    assert isinstance(larger, Resize)
    assert (smaller.workers, larger.workers) == (2, 3)
    drained.answer(True, "it leaves")
    smaller.answer(False, "2 is below world.min, which is 3")
    assert notes == [
        "SIGKILL to rank 0 (w1) ['w1']",
        "SIGSTOP to rank 1 (w4) for 0.5 s ['w4']",
        "rank 2 (w3) has to leave within 4 s ['w3']",
        "2 workers less []",
        "1 worker more []",
        "no kill: there is no rank 7 []",
        "2 workers less is refused: 2 is below world.min, which is 3 []",
    ]


HARMED = """
from worldline.worker.actor import Worker
Worker.harm(None, {number}, {resume_s})
print("goes on")
"""


@pytest.mark.parametrize(
    ("number", "resume_s", "code", "said"),
    [(signal.SIGKILL, None, -9, ""), (signal.SIGSTOP, 0.1, 0, "goes on\n")],
)
def test_a_worker_harms_itself(number: int, resume_s: float | None, code: int, said: str) -> None:
    program = HARMED.format(number=int(number), resume_s=resume_s)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, said)
