"""A fault script: what a user says shall go wrong with a run, read and checked.

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

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

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
