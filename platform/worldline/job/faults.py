"""What is wrong with a job, in the user's words: one line a fault, with the key's dotted path."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from worldline.job.spec import Job, Section

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


class JobError(Exception):
    """The job cannot run as it is written. faults: one message for each thing to change."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[JobError], tuple[tuple[str, ...]]]:
        """A worker raises it, too, and it comes to the driver as it was."""
        return JobError, (self.faults,)


def validation_faults(error: ValidationError, root: type[Section] = Job, name: str = "job") -> list[str]:
    """pydantic's findings on a `root`, called `name`: the key, what was expected there, what was found."""
    return [_fault(detail, root, name) for detail in error.errors(include_url=False)]


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A half sentence that leads from a wrong name to the right one: `; did you mean 'x'?` or the list."""
    known = list(known)
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; there is {', '.join(sorted(known))}" if known else ""


def dotted(location: Sequence[int | str]) -> str:
    """("data", "columns", 0) -> "data.columns[0]"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _fault(detail: ErrorDetails, root: type[Section], name: str) -> str:
    location, found = detail["loc"], detail["input"]
    key = dotted(location)
    match detail["type"]:
        case "missing":
            return f"{key}: expected a value, found none; this key is required"
        case "extra_forbidden":
            return f"{key}: unknown key{_right_key(location, root)}"
        case "value_error":
            return f"{key or name}: {detail['msg'].removeprefix('Value error, ')}"
        case "string_pattern_mismatch":
            field = _field(location, root)
            expected = field.description if field and field.description else detail["msg"]
        case "model_type" | "dict_type":
            expected = "keys with values"
        case "literal_error" | "enum":
            expected = detail["ctx"]["expected"]
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            expected = f"a number {detail['msg'].removeprefix('Input should be ')}"
        case _:
            expected = detail["msg"].removeprefix("Input should be ").split(", ")[0]
    return f"{key or name}: expected {expected}, found {found!r}"


def _right_key(location: Sequence[int | str], root: type[Section]) -> str:
    """Where an unknown key was meant to stand: beside its neighbours, or under the same name elsewhere."""
    *parents, last = location
    name, section = str(last), _section(parents, root)
    siblings = list(_fields(section)) if section else []
    if not difflib.get_close_matches(name, siblings, n=1):
        elsewhere = [path for path in _paths(root) if path.rpartition(".")[2] == name]
        if elsewhere:
            return f"; did you mean {elsewhere[0]!r}?"
    return nearest(name, siblings, prefix=f"{dotted(parents)}." if parents else "")


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _subsection(field: FieldInfo) -> type[Section] | None:
    return _first_section(field.annotation)


def _first_section(annotation: Any) -> type[Section] | None:
    """The section in `S`, `S | None`, `list[S]`, ..."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_first_section, get_args(annotation))), None)


def _field(location: Sequence[int | str], root: type[Section]) -> FieldInfo | None:
    section = _section(location[:-1], root)
    return _fields(section).get(str(location[-1])) if section else None


def _section(location: Sequence[int | str], root: type[Section]) -> type[Section] | None:
    section: type[Section] | None = root
    for part in location:
        if isinstance(part, int):  # a place in a list of sections
            continue
        field = _fields(section).get(part) if section else None
        section = _subsection(field) if field else None
    return section


def _paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in _fields(section).items():
        yield prefix + name
        if inner := _subsection(field):
            yield from _paths(inner, f"{prefix}{name}.")
