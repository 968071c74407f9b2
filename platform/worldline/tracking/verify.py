"""Whether two runs walked the same line: the first step and field in which their numbers differ. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = ("loss", "lr", "grad_norm", "rows", "rows_digest")
OPTIONAL = ("state_digest",)  # taken every few steps: compared where both have it

Step = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    step: int
    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"step {self.step}: {self.field} is {self.a!r} and {self.b!r}"


@dataclass(frozen=True)
class Comparison:
    """num_a, num_b: steps of each; num_common: those both have; num_digests: those with two digests."""

    num_a: int
    num_b: int
    num_common: int
    num_digests: int
    difference: Difference | None


def first_difference(steps_a: Sequence[Step], steps_b: Sequence[Step]) -> Difference | None:
    """Of the steps both have, in order; None where all are equal, bit by bit."""
    other = {step["step"]: step for step in steps_b}
    for a in sorted(steps_a, key=lambda step: int(step["step"])):
        b = other.get(a["step"])
        if b is None:
            continue
        for field in FIELDS:
            if not _same(a.get(field), b.get(field)):
                return Difference(a["step"], field, a.get(field), b.get(field))
        for field in OPTIONAL:
            if a.get(field) and b.get(field) and a[field] != b[field]:
                return Difference(a["step"], field, a[field], b[field])
    return None


def compare(steps_a: Sequence[Step], steps_b: Sequence[Step]) -> Comparison:
    digests_b = {step["step"]: step.get("state_digest") for step in steps_b}
    common = [step for step in steps_a if step["step"] in digests_b]
    return Comparison(
        num_a=len(steps_a),
        num_b=len(steps_b),
        num_common=len(common),
        num_digests=sum(1 for step in common if step.get("state_digest") and digests_b[step["step"]]),
        difference=first_difference(steps_a, steps_b),
    )


def _same(a: Any, b: Any) -> bool:
    """Equal bits: 0.0 is not -0.0, and a NaN equals a NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)
