"""How a hang is told to people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worldline.collective.operations import Operation
from worldline.health.condition import Condition

MOST_NAMED = 8


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 3" """
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > MOST_NAMED:
        first = ", ".join(map(str, numbers[: MOST_NAMED // 2]))
        return f"ranks {first} and {len(numbers) - MOST_NAMED // 2} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def each(said: Mapping[int, str], names: Mapping[int, str]) -> str:
    """Something about each of several ranks; with its name, where it has one."""
    parts = [f"{_who(rank, names)} {what}" for rank, what in sorted(said.items())]
    more = len(parts) - MOST_NAMED
    return "; ".join([*parts[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


def wait_in(waiting: Sequence[int], operation: Operation) -> str:
    return f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {full(operation)}"


def full(operation: Operation) -> str:
    lane, sequence = operation.place
    return f"{operation.what} (operation {sequence} of lane {lane}, {operation.num_bytes:,} bytes)"


def does(condition: Condition) -> str:
    """What a rank does that waits in no operation."""
    what = "waited for rows" if condition.phase == "data" else f"been in phase {condition.phase}"
    steps = "1 completed step" if condition.step == 1 else f"{condition.step} completed steps"
    return f"has {what} for {condition.phase_s:.1f} s, after {steps}{at(condition)}"


def account(rank: int, condition: Condition | None, names: Mapping[int, str]) -> str:
    """All that is known of a rank, in lines."""
    if condition is None:
        return f"{_who(rank, names)} gave no answer"
    lines = [f"{_who(rank, names)} {does(condition)}"]
    if condition.waits_in is not None:
        lines.append(f"  waits for {condition.waits_s:.1f} s in {full(condition.waits_in)}")
    newest = {o.lane: o for o in condition.entered}
    for o in newest.values():
        state = "under way" if o in condition.unfinished else "done"
        lines.append(f"  last entered: {full(o)}, {state}")
    return "\n".join([*lines, condition.stack.rstrip()]).rstrip()


def at(condition: Condition) -> str:
    return f", at {condition.where}" if condition.where else ""


def now_at(condition: Condition) -> str:
    return f" (now at {condition.where})" if condition.where else ""


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _who(rank: int, names: Mapping[int, str]) -> str:
    return f"rank {rank} ({names[rank]})" if rank in names else f"rank {rank}"
