"""A fault script: what shall go wrong with a run, and when. Once it is read all is pure: the time comes in,
chance has a seed.

Either a list of faults, each of which comes once:

    faults:
      - {at_step: 100, kill: 1}              # SIGKILL to the process of rank 1, once step 100 is completed
      - {at_s: 30, stop: any, resume_s: 2}   # SIGSTOP 30 s after training began, SIGCONT 2 s later
      - {at_step: 200, drain: 0, lead_s: 10} # rank 0 leaves as if its node were taken away in 10 s
      - {at_step: 300, remove: 1}            # one worker less from now on
      - {at_step: 400, add: 1}

or faults at random:

    random: {seed: 7, every_s: [2, 10], kinds: [kill, stop, drain, add, remove], until_step: 5000}
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    Field,
    NonNegativeFloat,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from worldline.job.faults import JobError, validation_faults
from worldline.job.load import read_yaml
from worldline.job.spec import Section

LEAD_S = 10.0


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    DRAIN = "drain"
    ADD = "add"
    REMOVE = "remove"


def _who(value: Any) -> int | Literal["any"]:
    if value == "any" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"expected a rank or any, found {value!r}")


def _between(value: Any) -> tuple[float, float]:
    match value:
        case [int() | float() as low, int() | float() as high] if 0 < low <= high:
            return float(low), float(high)
    raise ValueError(f"expected [from, to], two numbers of seconds above 0, found {value!r}")


Who = Annotated[int | Literal["any"], PlainValidator(_who)]


class FaultSpec(Section):
    """One fault. `any` is a rank that chance picks; add and remove take a number of workers."""

    at_step: PositiveInt | None = None
    at_s: NonNegativeFloat | None = None
    kill: Who | None = None
    stop: Who | None = None
    drain: Who | None = None
    add: PositiveInt | None = None
    remove: PositiveInt | None = None
    resume_s: PositiveFloat | None = None
    lead_s: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> FaultSpec:
        if (self.at_step is None) == (self.at_s is None):
            raise ValueError("give exactly one of at_step and at_s")
        if sum(getattr(self, kind) is not None for kind in Kind) != 1:
            raise ValueError(f"give exactly one of {', '.join(Kind)}")
        if self.resume_s is not None and self.stop is None:
            raise ValueError("resume_s goes with stop")
        if self.lead_s is not None and self.drain is None:
            raise ValueError("lead_s goes with drain")
        return self

    @property
    def kind(self) -> Kind:
        return next(kind for kind in Kind if getattr(self, kind) is not None)


class RandomSpec(Section):
    """A fault every so many seconds, for `for_s` or until `until_step`, else to the end. leave: so many
    members are always let alone; 0 may cost the steps since the newest checkpoint.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    every_s: Annotated[tuple[float, float], PlainValidator(_between)]
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = tuple(Kind)
    leave: Annotated[int, Field(ge=0)] = 1
    lead_s: NonNegativeFloat = LEAD_S
    for_s: PositiveFloat | None = None
    until_step: PositiveInt | None = None


class Script(Section):
    faults: tuple[FaultSpec, ...] = ()
    random: RandomSpec | None = None

    @model_validator(mode="after")
    def _one(self) -> Script:
        if bool(self.faults) == (self.random is not None):
            raise ValueError("give either faults, one at least, or random")
        return self


def load_script(path: str | Path) -> Script:
    """Raises JobError, one fault for each thing to change."""
    raw = read_yaml(Path(path))
    try:
        return Script.model_validate(raw)
    except ValidationError as error:
        raise JobError([f"{path}: {fault}" for fault in validation_faults(error, Script, "it")]) from None


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
