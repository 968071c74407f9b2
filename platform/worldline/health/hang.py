"""Who keeps a generation from going on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from worldline.collective.operations import Operation
from worldline.health import words
from worldline.health.condition import Condition

SAME_BYTES = frozenset({"all_reduce"})
"""Kinds of operations where every rank must send as much as the others."""

SILENT = (
    "gave no answer: its process is stopped, its node cannot be reached, or it is stuck in code that holds "
    "Python's lock"
)
THROUGH = "has stopped training with the others"
UNDECIDED = "who is wrong cannot be told, as they are equally many"


def deadline(
    step_times: Sequence[float],
    bound_s: float,
    declared: int = 0,
    *,
    least_s: float = 10.0,
    times: float = 20.0,
) -> float:
    """How many seconds may pass without a completed step before it counts as a hang.

    step_times: seconds of recent steps. bound_s: the longest, whatever they took; it counts alone where no
    step is known. declared: hangs that were declared at this step before; each doubles the time, so that a
    step that is only slow is completed in the end.
    """
    if not step_times:
        return bound_s
    usual = max(least_s, times * median(step_times))
    return float(min(bound_s, usual * 2 ** min(declared, 64)))


@dataclass(frozen=True)
class Verdict:
    """Who keeps a generation from going on, as far as that can be told.

    culprits: ranks, ascending; empty where none is more to blame than the others. reasons: of each culprit,
    what is said of it after "rank 2". tied: the culprits are all at odds, and no rank is beyond doubt, so
    some of them are named wrongly. operation: what the others wait in, if they wait in one. text: one
    paragraph for people.
    """

    culprits: tuple[int, ...]
    text: str
    reasons: Mapping[int, str] = field(default_factory=dict)
    tied: bool = False
    operation: Operation | None = None


def diagnose(
    conditions: Mapping[int, Condition | None], generation: int, names: Mapping[int, str] | None = None
) -> Verdict:
    """Judge a generation that does not go on. Raises ValueError if there is no rank.

    conditions: by rank, of all its ranks, also of those for whom it has ended; None for who gave no answer.
    names: by rank, what its worker and its node shall be called.

    To blame is who gave no answer. Else who entered another operation than most did at the same place. Else
    who waits in no operation and has not entered what others wait in, unless it waits for rows. Else, where
    all wait for each other in different operations, who is not where most are. Where all entered what is
    waited in, what they send does not come through, and that is no rank's fault.
    """
    if not conditions:
        raise ValueError("there is no rank to diagnose")
    case = _Case(conditions, generation, names or {})
    if case.silent:
        cut_off = "" if case.answered else "nobody answered: it may be this process that is cut off"
        return case.verdict(dict.fromkeys(case.silent, SILENT), tied=not case.answered, end=cut_off)
    return _different(case) or _behind(case) or _crossed(case) or _lost(case) or _busy(case)


def accounts(
    conditions: Mapping[int, Condition | None], verdict: Verdict, names: Mapping[int, str] | None = None
) -> str:
    """What each rank does, with its stack, in lines: the culprits and then the others, so many of each."""
    culprits = [r for r in sorted(conditions) if r in verdict.culprits]
    others = [r for r in sorted(conditions) if r not in verdict.culprits]
    told = culprits[: words.MOST_NAMED] + others[: words.MOST_NAMED]
    return "\n".join(words.account(rank, conditions[rank], names or {}) for rank in told)


class _Case:
    """silent, absent, present: ranks by whether they answered and have begun the generation. through: for
    whom it has ended. waits: operation that a rank waits in.
    """

    def __init__(
        self, conditions: Mapping[int, Condition | None], generation: int, names: Mapping[int, str]
    ) -> None:
        self.names = names
        self.answered = {r: c for r, c in sorted(conditions.items()) if c is not None}
        self.silent = sorted(conditions.keys() - self.answered.keys())
        # What a rank entered in another generation says nothing of this one.
        self.present = {r: c for r, c in self.answered.items() if c.generation == generation}
        self.absent = sorted(self.answered.keys() - self.present.keys())
        self.through = {r for r, c in self.present.items() if c.phase == "idle"}
        self.waits = {r: c.waits_in for r, c in self.present.items() if c.waits_in is not None}

    def lacking(self, operation: Operation) -> list[int]:
        """Who has not entered it."""
        behind = (r for r, c in self.present.items() if not c.has_entered(operation))
        return sorted([*self.absent, *behind])

    def most_waited(self, ranks: Iterable[int]) -> Operation | None:
        """What most of them wait in; of several the first."""
        counts = Counter(self.waits[r].place for r in ranks if r in self.waits)
        if not counts:
            return None
        place = min(counts, key=lambda place: (-counts[place], place))
        return next(o for o in self.waits.values() if o.place == place)

    def waiting_in(self, operation: Operation) -> list[int]:
        return [r for r, o in self.waits.items() if o.place == operation.place]

    def doing(self, rank: int) -> str:
        if rank in self.absent:
            return "has not begun to train with the others"
        return THROUGH if rank in self.through else words.does(self.present[rank])

    def verdict(
        self,
        reasons: Mapping[int, str],
        *,
        operation: Operation | None = None,
        tied: bool = False,
        also: Mapping[int, str] | None = None,
        end: str = "",
    ) -> Verdict:
        """reasons: of the culprits; also: of others who are worth a word. end: what follows on them."""
        operation = operation or self.most_waited(self.waits)
        waiting = [] if operation is None or tied else self.waiting_in(operation)
        sentences = []
        if operation is not None and not set(waiting) <= reasons.keys():
            sentences.append(words.wait_in(waiting, operation))
        for said in (reasons, also or {}):
            if said:
                sentences.append(words.each(said, self.names))
        if end or tied:
            sentences.append(end or UNDECIDED)
        text = " ".join(words.sentence(s) for s in sentences)
        return Verdict(tuple(sorted(reasons)), text, dict(reasons), tied, operation)


def _different(case: _Case) -> Verdict | None:
    """Ranks entered different operations at the same place of a lane."""
    places: dict[tuple[int, int], dict[int, Operation]] = {}
    for rank, condition in case.present.items():
        for operation in condition.entered:
            places.setdefault((operation.sequence, operation.lane), {})[rank] = operation
    for _, by_rank in sorted(places.items()):
        groups: dict[object, list[int]] = {}
        for rank, o in by_rank.items():
            form = (o.kind, o.label, o.num_bytes if o.kind in SAME_BYTES else None)
            groups.setdefault(form, []).append(rank)
        if len(groups) > 1:
            break
    else:
        return None
    most, second, *_ = sorted(groups.values(), key=len, reverse=True)
    tied = len(most) == len(second)
    common = by_rank[most[0]]
    place = f"as operation {common.sequence} of lane {common.lane}"
    if not tied:
        place += f", where {words.ranks(most)} entered {common.what} ({common.num_bytes:,} bytes)"
    reasons = {}
    for rank, o in by_rank.items():
        if tied or rank not in most:
            now = words.now_at(case.present[rank])
            reasons[rank] = f"entered {o.what} ({o.num_bytes:,} bytes) {place}{now}"
    return case.verdict(reasons, tied=tied, operation=common)


def _behind(case: _Case) -> Verdict | None:
    """Ranks wait in an operation that others, who wait in none, have not entered."""
    missing = {r: [m for m in case.lacking(o) if m not in case.waits] for r, o in case.waits.items()}
    late = {m for ranks in missing.values() for m in ranks}
    if not late:
        return None
    if late <= case.through and len(late) >= len(missing):
        return _one_more(case, late)
    for_rows = {r for r in late if r in case.present and case.present[r].phase == "data"}
    named = late - for_rows or late
    reasons = {}
    for rank in late:
        awaited = case.most_waited(r for r, ranks in missing.items() if rank in ranks)
        assert awaited is not None
        reasons[rank] = f"has not entered {awaited.what}: it {case.doing(rank)}"
    return case.verdict(
        {r: reasons[r] for r in late - for_rows},
        operation=case.most_waited(r for r, ranks in missing.items() if named & set(ranks)),
        also={r: reasons[r] for r in for_rows},
        end="" if late - for_rows else "rows are late, and no rank is to blame for that",
    )


def _one_more(case: _Case, late: set[int]) -> Verdict:
    """Ranks wait in what no others enter, as these have come to their end, and are at least as many."""
    tied = len(late) == len(case.waits)
    without = f"which {words.ranks(sorted(late))} never entered"
    reasons = {
        rank: f"waits in {words.full(o)}{words.at(case.present[rank])}, {without}"
        for rank, o in case.waits.items()
    }
    if tied:
        reasons |= dict.fromkeys(late, THROUGH)
    return case.verdict(reasons, tied=tied)


def _crossed(case: _Case) -> Verdict | None:
    """Every rank waits, and each for one that waits in another operation."""
    operation = case.most_waited(case.waits)
    if operation is None or not all(case.lacking(o) for o in case.waits.values()):
        return None
    counts = Counter(o.place for o in case.waits.values())
    tied = list(counts.values()).count(counts[operation.place]) > 1
    reasons = {
        rank: f"has not entered {operation.what}: it waits in {words.full(o)}{words.at(case.present[rank])}"
        for rank, o in case.waits.items()
        if rank in case.lacking(operation)
    }
    if tied:
        reasons = {
            rank: f"waits in {words.full(o)}{words.at(case.present[rank])}" for rank, o in case.waits.items()
        }
    return case.verdict(reasons, tied=tied, operation=operation)


def _lost(case: _Case) -> Verdict | None:
    """What is waited in was entered by all."""
    operation = case.most_waited(r for r, o in case.waits.items() if not case.lacking(o))
    if operation is None:
        return None
    return case.verdict(
        {},
        operation=operation,
        end="all ranks entered it, so what they send does not come through: no rank is to blame, look at the "
        "network between their nodes",
    )


def _busy(case: _Case) -> Verdict:
    """Nobody waits in an operation."""
    doing = {r: case.doing(r) for r in case.answered}
    blameless = case.through | {r for r, c in case.present.items() if c.phase in ("data", "form")}
    named = {r: what for r, what in doing.items() if r not in blameless}
    if not named:
        return case.verdict({}, also=doing, end="no rank is to blame for that")
    return case.verdict(named, tied=len(named) == len(doing) > 1, end="no rank waits in an operation")
