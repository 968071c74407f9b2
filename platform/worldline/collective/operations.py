"""What this rank entered of its group's operations, for whoever looks when nothing goes on."""

from __future__ import annotations

from typing import NamedTuple

KEPT = 16
"""Operations of each lane that are remembered."""


class Operation(NamedTuple):
    """One operation that this rank entered.

    sequence: counts the lane's operations of a generation from 0, the same on every rank as long as all call
    alike. num_bytes: what this rank sends; where the parts are uneven it differs from rank to rank.
    """

    lane: int
    sequence: int
    kind: str
    label: str
    num_bytes: int

    @property
    def what(self) -> str:
        return f"{self.kind} {self.label}"

    @property
    def place(self) -> tuple[int, int]:
        """(lane, sequence): at the same place all ranks must enter the same."""
        return self.lane, self.sequence


class OperationLog:
    """The last operations of each lane, and the one that is waited in.

    Protocol: one thread calls `enter` and sets `waiting`; any thread reads. There is no lock, as the log lies
    on the way of a step: every change is one assignment, which another thread sees whole or not yet.

    waiting: the operation, and since when (seconds of `time.monotonic`).
    """

    __slots__ = ("_next", "_rings", "waiting")

    def __init__(self, num_lanes: int) -> None:
        self._rings: list[list[Operation | None]] = [[None] * KEPT for _ in range(num_lanes)]
        self._next = [0] * num_lanes
        self.waiting: tuple[Operation, float] | None = None

    def enter(self, lane: int, kind: str, label: str, num_bytes: int) -> Operation:
        sequence = self._next[lane]
        self._next[lane] = sequence + 1
        operation = Operation(lane, sequence, kind, label, num_bytes)
        self._rings[lane][sequence % KEPT] = operation
        return operation

    def entered(self) -> tuple[Operation, ...]:
        """What is remembered, lane by lane, the newest of a lane last."""
        # Copied first: a list is copied whole, while a walk over it could see a ring change under it.
        rings = [list(ring) for ring in self._rings]
        return tuple(sorted(operation for ring in rings for operation in ring if operation is not None))
