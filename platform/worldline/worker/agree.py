"""No first update before all members agree on where the line is, on the data and on the arithmetic."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence

from worldline.collective.exchange import Gather
from worldline.collective.group import Abandoned, CollectiveFailed, Group


class Disagreed(RuntimeError):
    """Members differ in what must be the same before they may train together."""


class Agreement:
    """Compares `claims` (name -> value) of all members; each name among those who claim anything for it.

    Begins when it is made, by every member alike; the answers travel while the first step is computed.
    `finish()` waits for them; it raises Disagreed, with the same words on every rank that comes so far,
    naming the first claim that differs and who says what. Once it returned, it does so at once. `reached()`
    only looks: whether all answers are there and equal.
    """

    def __init__(self, group: Group | None, claims: Mapping[str, str]) -> None:
        encoded = json.dumps(dict(claims), sort_keys=True).encode()
        self._gather: Gather | None = Gather(group, encoded, "agreement")

    def finish(self) -> None:
        if self._gather is None:
            return
        difference = first_difference([json.loads(c) for c in self._gather.finish()])
        if difference:
            raise Disagreed(difference)
        self._gather = None

    def reached(self) -> bool:
        if self._gather is not None and self._gather.done():
            with contextlib.suppress(CollectiveFailed, Abandoned, Disagreed):
                self.finish()
        return self._gather is None


def first_difference(claims: Sequence[Mapping[str, str]]) -> str:
    """claims: one mapping a rank. Empty where all are equal."""
    for name in sorted({name for claim in claims for name in claim}):
        said: dict[str, list[int]] = {}
        for rank, claim in enumerate(claims):
            if name in claim:
                said.setdefault(claim[name], []).append(rank)
        if len(said) > 1:
            parts = [f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in said.items()]
            return f"the members differ in {name}: {'; '.join(parts)}"
    return ""
