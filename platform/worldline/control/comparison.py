"""Compares what the members say their state is."""

from __future__ import annotations

from collections.abc import Collection

from worldline.worker.orders import StateDigest

Moment = tuple[int, int]
"""(generation, step)"""


class Comparison:
    """Members tell their digests in order, but each in its own time: one may be many steps behind another.

    `drift` says how members differ, once they do. `settle` forgets what all members have told; of each moment
    that is left one worker is kept for every digest, which is one while the members agree.
    """

    def __init__(self) -> None:
        self._tellers: dict[Moment, dict[str, str]] = {}  # digest -> the first who told it
        self._newest: dict[str, Moment] = {}
        self.drift = ""

    def tell(self, said: StateDigest, id: str) -> None:
        moment = said.generation, said.step
        self._newest[id] = moment
        tellers = self._tellers.setdefault(moment, {})
        tellers.setdefault(said.digest, id)
        if len(tellers) > 1 and not self.drift:
            parts = ", ".join(f"{worker}: {digest[:12]}" for digest, worker in tellers.items())
            self.drift = f"the members' states differ after step {said.step} ({parts})"

    def forget(self, id: str) -> None:
        self._newest.pop(id, None)

    def settle(self, members: Collection[str]) -> None:
        """members: those of whom digests are still to come."""
        if not all(id in self._newest for id in members):
            return
        told_by_all = min((self._newest[id] for id in members), default=(0, 0))
        for moment in [moment for moment in self._tellers if moment <= told_by_all]:
            del self._tellers[moment]
