"""Who is blamed for a hang: ranks that run one program, of which something goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.collective.operations import KEPT, Operation
from worldline.health.condition import Condition
from worldline.health.hang import accounts, deadline, diagnose

GENERATION = 3
LANES = 3


@dataclass(frozen=True)
class Start:
    lane: int
    label: str


@dataclass(frozen=True)
class Wait:
    """For the operation started that many starts ago."""

    back: int


@dataclass(frozen=True)
class Compute:
    phase: str = "compute"


Action = Start | Wait | Compute


@dataclass
class Rank:
    """Does its actions one by one, as far as the others let it."""

    actions: list[Action]
    stuck_at: int = -1
    at: int = 0
    entered: list[Operation] = field(default_factory=list)
    waits_in: Operation | None = None
    phase: str = "idle"

    def go_on(self, ends: Callable[[Operation], bool]) -> bool:
        """Whether it got anywhere."""
        before = self.at
        while self.at < len(self.actions) and self.at != self.stuck_at:
            action = self.actions[self.at]
            self.waits_in = None
            if isinstance(action, Start):
                sequence = sum(o.lane == action.lane for o in self.entered)
                self.entered.append(Operation(action.lane, sequence, "all_to_all", action.label, 64))
            elif isinstance(action, Wait) and self.entered:
                operation = self.entered[-1 - action.back % len(self.entered)]
                if not ends(operation):
                    self.waits_in, self.phase = operation, "reduce"
                    break
            elif isinstance(action, Compute):
                self.phase = action.phase
            self.at += 1
        if self.at == self.stuck_at:
            self.phase = "compute"
        elif self.at == len(self.actions):
            self.phase = "idle"
        return self.at > before

    def condition(self) -> Condition:
        kept = [o for lane in range(LANES) for o in [e for e in self.entered if e.lane == lane][-KEPT:]]
        place = "a.py:1 in f"
        return Condition(GENERATION, 17, self.phase, 12.0, self.waits_in, 11.0, tuple(kept), where=place)


def run(ranks: list[Rank], never: Operation | None = None) -> dict[int, Condition | None]:
    """Their conditions once none gets any further. never: place of an operation whose bytes are lost."""

    def ends(operation: Operation) -> bool:
        if never is not None and operation.place == never.place:
            return False
        return all(any(o.place == operation.place for o in rank.entered) for rank in ranks)

    while sum(rank.go_on(ends) for rank in ranks):
        pass
    return {number: rank.condition() for number, rank in enumerate(ranks)}


@st.composite
def programs(draw: st.DrawFn) -> list[Action]:
    """What every rank of a healthy world does; every operation is waited for in the end."""
    actions: list[Action] = [Compute("data"), Start(0, "words 0")]
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["start", "start", "wait", "compute", "data"]))
        if kind == "start":
            actions.append(Start(draw(st.integers(0, LANES - 1)), f"op {number}"))
        elif kind == "wait":
            actions.append(Wait(draw(st.integers(0, 5))))
        else:
            actions.append(Compute(kind))
    starts = sum(isinstance(a, Start) for a in actions)
    return [*actions, *(Wait(back) for back in reversed(range(starts)))]


sizes = st.integers(2, 6)


@given(programs(), sizes)
def test_a_healthy_program_comes_to_its_end(program, size):
    assert {c.phase for c in run([Rank(program) for _ in range(size)]).values()} == {"idle"}


@given(programs(), sizes, st.data())
def test_who_is_stuck_in_its_own_code_is_named(program, size, data):
    victim = data.draw(st.integers(0, size - 1))
    stuck_at = data.draw(st.integers(0, program.index(next(a for a in program if isinstance(a, Wait)))))
    last = len(program) - 1 - program[::-1].index(next(a for a in reversed(program) if isinstance(a, Start)))
    stuck_at = min(stuck_at, last)  # beyond its last operation nobody waits for it
    ranks = [Rank(program, stuck_at if rank == victim else -1) for rank in range(size)]
    verdict = diagnose(run(ranks), GENERATION, {victim: "worker w9 on node n7"})
    assert verdict.culprits == (victim,)
    assert not verdict.tied
    assert verdict.operation is not None
    assert verdict.operation not in ranks[victim].entered
    for part in (f"rank {victim} (worker w9 on node n7)", "a.py:1 in f", verdict.operation.label, "64 bytes"):
        assert part.lower() in verdict.text.lower()


@given(programs(), sizes, st.data())
def test_who_gives_no_answer_is_named_whatever_the_others_do(program, size, data):
    stuck_at = data.draw(st.integers(0, len(program) - 1))
    conditions = run([Rank(program, stuck_at), *(Rank(program) for _ in range(size - 1))])
    silent = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    verdict = diagnose(conditions | dict.fromkeys(silent), GENERATION)
    assert verdict.culprits == tuple(sorted(silent))
    assert verdict.tied == (len(silent) == size)
    assert set(verdict.reasons) == silent


@given(programs(), st.integers(3, 6), st.data())
def test_who_skips_an_operation_or_calls_one_more_is_named(program, size, data):
    """Also if that was the last one and the others are through."""
    victim = data.draw(st.integers(0, size - 1))
    place = data.draw(st.sampled_from([i for i, a in enumerate(program) if isinstance(a, Start)]))
    skips = data.draw(st.booleans())
    other = [*program]
    if skips:
        other[place] = Compute()
    else:
        place += data.draw(st.integers(0, 1))
        other[place:place] = [Start(data.draw(st.integers(0, LANES - 1)), "one more"), Wait(0)]
    ranks = [Rank(other if rank == victim else program) for rank in range(size)]
    conditions = run(ranks)
    assert any(c.waits_in for c in conditions.values())
    verdict = diagnose(conditions, GENERATION)
    assert verdict.culprits == (victim,), verdict.text
    assert not verdict.tied


@given(programs(), st.integers(2, 6), st.data())
def test_who_swaps_two_operations_is_named_and_with_two_ranks_both_are(program, size, data):
    victim = data.draw(st.integers(0, size - 1))
    base = [*program, Start(2, "x"), Start(2, "y"), Wait(0), Wait(1)]
    other = [*program, Start(2, "y"), Start(2, "x"), Wait(0), Wait(1)]
    # They are exchanged silently, so nobody waits: it shows all the same if something else hangs.
    ranks = [Rank([*base, Compute()], len(base)) for _ in range(size)]
    ranks[victim] = Rank([*other, Compute()], len(other))
    verdict = diagnose(run(ranks), GENERATION)
    assert verdict.culprits == ((0, 1) if size == 2 else (victim,))
    assert verdict.tied == (size == 2)
    assert "all_to_all y" in verdict.text
    assert "all_to_all x" in verdict.text


@given(programs(), sizes, st.data())
def test_nobody_is_named_where_bytes_are_lost(program, size, data):
    starts = [a for a in program if isinstance(a, Start)]
    lost = data.draw(st.integers(0, len(starts) - 1))
    sequence = sum(a.lane == starts[lost].lane for a in starts[:lost])
    never = Operation(starts[lost].lane, sequence, "", "", 0)
    verdict = diagnose(run([Rank(program) for _ in range(size)], never), GENERATION)
    assert verdict.culprits == ()
    assert verdict.operation.place == never.place
    assert "network" in verdict.text


@given(programs(), sizes, st.data())
def test_who_waits_for_rows_is_named_and_not_blamed(program, size, data):
    victim = data.draw(st.integers(0, size - 1))
    ranks = [Rank(program, 0 if rank == victim else -1) for rank in range(size)]
    conditions = run(ranks)
    conditions[victim] = replace(conditions[victim], phase="data")
    verdict = diagnose(conditions, GENERATION)
    assert verdict.culprits == ()
    said = f"ank {victim} has not entered {verdict.operation.what}: it has waited for rows for 12.0 s"
    assert said in verdict.text


@given(programs(), st.data())
def test_with_two_ranks_a_skipped_call_names_both_with_their_lines(program, data):
    base = [*program, Start(2, "gather x"), Wait(0), Start(0, "next step"), Wait(0)]
    skips = [*program, Start(0, "next step"), Wait(0)]
    victim = data.draw(st.integers(0, 1))
    ranks = [Rank(skips if rank == victim else base) for rank in range(2)]
    conditions = {r: replace(c, where=f"job.py:{r} in f") for r, c in run(ranks).items()}
    verdict = diagnose(conditions, GENERATION)
    assert (verdict.culprits, verdict.tied) == ((0, 1), True)
    for part in ("gather x", "next step", "job.py:0 in f", "job.py:1 in f"):
        assert part in verdict.text


conditions = st.builds(
    Condition,
    generation=st.sampled_from([GENERATION - 1, GENERATION]),
    step=st.just(17),
    phase=st.sampled_from(["idle", "form", "data", "compute", "reduce"]),
    phase_s=st.just(1.0),
    waits_in=st.none(),
    entered=st.builds(
        lambda n, label: tuple(Operation(0, k, "all_to_all", label, 1) for k in range(n)),
        st.integers(0, 3),
        st.sampled_from(["a", "a", "a", "b"]),
    ),
)


@st.composite
def anything(draw: st.DrawFn) -> dict[int, Condition | None]:
    """Answers that need not fit together, as they are given at different moments."""
    found: dict[int, Condition | None] = {}
    for rank in range(draw(st.integers(1, 6))):
        condition = draw(st.none() | conditions)
        if condition is not None and condition.entered and draw(st.booleans()):
            condition = replace(condition, waits_in=draw(st.sampled_from(condition.entered)))
        found[rank] = condition
    return found


@given(anything())
def test_whatever_they_answer_there_is_a_verdict_that_says_so(conditions):
    verdict = diagnose(conditions, GENERATION)
    assert set(verdict.culprits) <= conditions.keys()
    assert set(verdict.reasons) == set(verdict.culprits)
    assert verdict.text.endswith(".")
    assert verdict.text[0].isupper()
    assert "\n" not in verdict.text
    for rank in verdict.culprits:
        assert f"ank {rank} {verdict.reasons[rank]}" in verdict.text
    if len(verdict.culprits) == len(conditions) > 1:
        assert verdict.tied


def test_words():
    program = [Compute(), Start(0, "bucket 3"), Wait(0)]
    names = {rank: f"worker w{rank + 1} on node 10.0.0.{rank}" for rank in range(4)}
    found = diagnose(run([Rank(program, 0 if rank == 2 else -1) for rank in range(4)]), GENERATION, names)
    assert found.text == (
        "Ranks 0, 1 and 3 wait in all_to_all bucket 3 (operation 0 of lane 0, 64 bytes). "
        "Rank 2 (worker w3 on node 10.0.0.2) has not entered all_to_all bucket 3: "
        "it has been in phase compute for 12.0 s, after 17 completed steps, at a.py:1 in f."
    )
    many = diagnose(run([Rank(program, 0 if rank < 20 else -1) for rank in range(1000)]), GENERATION)
    assert many.culprits == tuple(range(20))
    assert "Ranks 20, 21, 22, 23 and 976 more wait in" in many.text
    assert many.text.endswith("; and 12 more.")


def test_accounts():
    calls = [(0, "bucket 3"), (0, "bucket 4"), (1, "x")]
    program = [Compute(), *(action for call in calls for action in (Start(*call), Wait(0)))]
    conditions = run([Rank(program, 5), Rank(program), Rank(program)]) | {3: None}
    waiting = conditions[1]
    conditions[1] = replace(waiting, unfinished=waiting.entered[-1:], stack="  File 1\n    wait()\n")
    verdict = diagnose(conditions, GENERATION)
    assert accounts(conditions, verdict, {0: "worker w1 on node n1"}).splitlines() == [
        "rank 3 gave no answer",
        "rank 0 (worker w1 on node n1) has been in phase compute for 12.0 s, after 17 completed steps, at "
        "a.py:1 in f",
        "  last entered: all_to_all bucket 4 (operation 1 of lane 0, 64 bytes), done",
        "rank 1 has been in phase reduce for 12.0 s, after 17 completed steps, at a.py:1 in f",
        "  waits for 11.0 s in all_to_all x (operation 0 of lane 1, 64 bytes)",
        "  last entered: all_to_all bucket 4 (operation 1 of lane 0, 64 bytes), done",
        "  last entered: all_to_all x (operation 0 of lane 1, 64 bytes), under way",
        "  File 1",
        "    wait()",
        "rank 2 has been in phase reduce for 12.0 s, after 17 completed steps, at a.py:1 in f",
        "  waits for 11.0 s in all_to_all x (operation 0 of lane 1, 64 bytes)",
        "  last entered: all_to_all bucket 4 (operation 1 of lane 0, 64 bytes), done",
        "  last entered: all_to_all x (operation 0 of lane 1, 64 bytes), done",
    ]
    many = run([Rank(program, 1 if rank < 20 else -1) for rank in range(40)])
    assert len(re.findall("^rank ", accounts(many, diagnose(many, GENERATION)), re.MULTILINE)) == 16


def test_a_rank_that_is_alone_is_named_and_ranks_that_all_compute_are_tied():
    alone = {0: Condition(GENERATION, 17, "compute", 30.0, where="a.py:1 in f")}
    assert diagnose(alone, GENERATION).culprits == (0,)
    assert not diagnose(alone, GENERATION).tied
    assert diagnose(alone | {1: alone[0]}, GENERATION).tied
    with pytest.raises(ValueError, match="no rank"):
        diagnose({}, GENERATION)


def test_who_is_through_is_not_blamed_for_who_is_stuck():
    through, stuck = Condition(GENERATION, 17, "idle", 9.0), Condition(GENERATION, 17, "compute", 30.0)
    verdict = diagnose({0: through, 1: through, 2: stuck}, GENERATION)
    assert (verdict.culprits, verdict.tied) == ((2,), False)
    assert diagnose({0: through, 1: through}, GENERATION).culprits == ()


def test_who_is_not_in_the_generation_keeps_those_who_connect():
    connects = Condition(GENERATION, 17, "form", 30.0)
    elsewhere = Condition(GENERATION - 1, 17, "compute", 30.0)
    assert diagnose({0: connects, 1: elsewhere, 2: connects}, GENERATION).culprits == (1,)
    assert diagnose({0: connects, 1: connects}, GENERATION).culprits == ()


times = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(times, st.floats(0.1, 1e6), st.integers(0, 100))
def test_a_deadline_follows_the_steps_and_never_passes_its_bound(step_times, bound, declared):
    found = deadline(step_times, bound, declared)
    assert min(bound, 10.0) <= found <= bound
    assert found <= deadline(step_times, bound, declared + 1)
    assert found >= min(bound, sorted(step_times)[len(step_times) // 2 - (len(step_times) % 2 == 0)])
    # Where it was declared again and again, the bound counts alone.
    assert deadline(step_times, bound, 64) == bound
    assert deadline([], bound, declared) == bound


def test_deadlines():
    assert deadline([0.1, 0.2, 5.0], 300.0) == 10.0
    assert deadline([1.0, 1.0, 40.0], 300.0) == 20.0
    assert deadline([1.0, 1.0, 40.0], 300.0, 2) == 80.0
    assert deadline([1.0], 300.0, 9) == 300.0
    assert deadline([0.1], 300.0, least_s=3.0) == 3.0
