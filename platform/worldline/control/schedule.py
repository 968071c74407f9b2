"""Which faults of a script are due. Pure: the time comes in, chance has a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from worldline.control.chaos import LEAD_S, FaultSpec, Kind, RandomSpec, Script


@dataclass(frozen=True)
class Fault:
    """What shall happen now. worker, rank: to whom, where it is to somebody. num: workers more or, below 0,
    less. missed: why it cannot happen, empty if it can.
    """

    kind: Kind
    worker: str = ""
    rank: int = -1
    num: int = 0
    lead_s: float = LEAD_S
    resume_s: float | None = None
    missed: str = ""

    def __str__(self) -> str:
        if self.missed:
            return f"no {self.kind}: {self.missed}"
        who = f"rank {self.rank} ({self.worker})"
        match self.kind:
            case Kind.KILL:
                return f"SIGKILL to {who}"
            case Kind.STOP:
                return f"SIGSTOP to {who}" + (f" for {self.resume_s:g} s" if self.resume_s else "")
            case Kind.DRAIN:
                return f"{who} has to leave within {self.lead_s:g} s"
            case Kind.ADD | Kind.REMOVE:
                return f"{abs(self.num)} worker{'' if abs(self.num) == 1 else 's'} {_MORE[self.kind]}"


_MORE = {Kind.ADD: "more", Kind.REMOVE: "less"}


class Schedule(Protocol):
    """Protocol: `due` often. It gives each fault once, at the first call at which its time has come.

    step: completed steps. now: seconds by any clock that never goes back. ranks: the current members, rank ->
    id. wanted: how many there should be. Time begins when there are members first; what was due at or before
    the step of then belongs to an earlier attempt.
    """

    def due(self, step: int, now: float, ranks: Mapping[int, str], wanted: int) -> list[Fault]: ...


def schedule(script: Script, least: int, most: int) -> Schedule:
    """least, most: workers that chance stays between."""
    if script.random is not None:
        return RandomFaults(script.random, least, most)
    return ListedFaults(script.faults)


class Harmed:
    """Whom a fault has befallen and who is still there: not to be picked again."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def healthy(self, ranks: Mapping[int, str]) -> dict[int, str]:
        self._ids &= set(ranks.values())
        return {rank: id for rank, id in sorted(ranks.items()) if id not in self._ids}

    def add(self, id: str) -> None:
        self._ids.add(id)


class ListedFaults:
    def __init__(self, faults: Sequence[FaultSpec]) -> None:
        self._waiting = list(enumerate(faults))
        self._harmed = Harmed()
        self._began: float | None = None

    def due(self, step: int, now: float, ranks: Mapping[int, str], wanted: int) -> list[Fault]:
        if self._began is None:
            if not ranks:
                return []
            self._began = now
            self._waiting = [
                (k, spec) for k, spec in self._waiting if spec.at_step is None or spec.at_step > step
            ]
        passed = now - self._began
        due = [(k, spec) for k, spec in self._waiting if _has_come(spec, step, passed)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in due]
        return [self._fault(k, spec, ranks) for k, spec in due]

    def _fault(self, place: int, spec: FaultSpec, ranks: Mapping[int, str]) -> Fault:
        kind = spec.kind
        value = getattr(spec, kind)
        if kind is Kind.ADD or kind is Kind.REMOVE:
            return Fault(kind, num=value if kind is Kind.ADD else -value)
        if value == "any":
            healthy = self._harmed.healthy(ranks)
            if not healthy:
                return Fault(kind, missed="there is no member that is well")
            value = random.Random(place).choice(sorted(healthy))
        if value not in ranks:
            return Fault(kind, rank=value, missed=f"there is no rank {value}")
        self._harmed.add(ranks[value])
        lead_s = LEAD_S if spec.lead_s is None else spec.lead_s
        return Fault(kind, ranks[value], value, lead_s=lead_s, resume_s=spec.resume_s)


def _has_come(spec: FaultSpec, step: int, passed: float) -> bool:
    if spec.at_step is not None:
        return step >= spec.at_step
    return spec.at_s is not None and passed >= spec.at_s


class RandomFaults:
    """What is drawn depends on the seed alone; of the kinds drawn, the first that is possible is taken."""

    def __init__(self, spec: RandomSpec, least: int, most: int) -> None:
        self._spec = spec
        self._least, self._most = least, most
        self._random = random.Random(spec.seed)
        self._harmed = Harmed()
        self._began: float | None = None
        self._next = 0.0

    def due(self, step: int, now: float, ranks: Mapping[int, str], wanted: int) -> list[Fault]:
        if self._began is None:
            if not ranks:
                return []
            self._began, self._next = now, now + self._random.uniform(*self._spec.every_s)
        if now < self._next or self._over(step, now - self._began):
            return []
        self._next = now + self._random.uniform(*self._spec.every_s)
        kinds = self._random.sample(self._spec.kinds, len(self._spec.kinds))
        luck = self._random.random()
        healthy = self._harmed.healthy(ranks)
        for kind in kinds:
            fault = self._possible(kind, healthy, luck, wanted)
            if fault is not None:
                return [fault]
        return []

    def _over(self, step: int, passed: float) -> bool:
        spec = self._spec
        late = spec.for_s is not None and passed >= spec.for_s
        return late or (spec.until_step is not None and step >= spec.until_step)

    def _possible(self, kind: Kind, healthy: Mapping[int, str], luck: float, wanted: int) -> Fault | None:
        if kind is Kind.ADD:
            return Fault(kind, num=1) if wanted < self._most else None
        if kind is Kind.REMOVE:
            return Fault(kind, num=-1) if wanted > self._least else None
        if len(healthy) <= self._spec.leave:
            return None
        rank = list(healthy)[int(luck * len(healthy))]
        self._harmed.add(healthy[rank])
        return Fault(kind, healthy[rank], rank, lead_s=self._spec.lead_s)
