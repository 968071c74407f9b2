"""Which nodes are given no worker for a while, because those they had did not last. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

FREE = 3.0
FORGIVEN_S = 30.0
"""After so long without a failure one strike is forgiven."""
SHORTEST_S = 4.0
LONGEST_S = 300.0


class Record(NamedTuple):
    """A node's strikes at `at`, and until when it cools for them."""

    strikes: float
    at: float
    until: float


@dataclass(frozen=True)
class Cooling:
    """Counts strikes against nodes: failures of workers that had hardly begun, or that froze.

    The first few cost nothing, since anybody may be killed; each one beyond `FREE` keeps new workers away for
    twice as long as the one before. closed: nodes that shall get none any more, as an operator drains them.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()

    def struck(self, node: str, now: float, strikes: float = 1.0) -> Cooling:
        old = self.records.get(node, Record(0.0, now, now))
        level = max(0.0, old.strikes - (now - old.at) / FORGIVEN_S) + strikes
        over = level - FREE
        seconds = min(LONGEST_S, SHORTEST_S * 2.0 ** min(over - 1, 16)) if over > 0 else 0.0
        record = Record(level, now, max(old.until, now + seconds))
        return replace(self, records={**self.records, node: record})

    def close(self, node: str) -> Cooling:
        return replace(self, closed=self.closed | {node})

    def avoided(self, now: float) -> frozenset[str]:
        """The nodes that get no new worker at this time."""
        return self.closed | {node for node, record in self.records.items() if now < record.until}
