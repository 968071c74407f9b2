"""From a job file to a `Job`, and from its names to the user's code; all faults before anything starts."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from worldline.job.faults import JobError, nearest, validation_faults
from worldline.job.spec import Job, TaskSpec
from worldline.usercode import raised

if TYPE_CHECKING:
    from worldline.task import Task

__all__ = [
    "JobError",
    "extend_path",
    "identity",
    "import_attribute",
    "job_digest",
    "load_job",
    "load_task",
    "read_yaml",
    "search_path",
]


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a YAML job file, lay `a.b=value` overrides over it, check the whole. Raises JobError."""
    raw = read_yaml(Path(path))
    faults = [fault for override in overrides if (fault := _override(raw, override))]
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise JobError([*faults, *validation_faults(error)]) from None
    if faults:
        raise JobError(faults)
    return job


def search_path(job_file: str | Path) -> list[Path]:
    """Where a job's task and transforms are imported from: the job file's folder, the working directory."""
    return list(dict.fromkeys((Path(job_file).resolve().parent, Path.cwd())))


def extend_path(search: Sequence[Path]) -> None:
    """Put `search` in front of this process's import path, in its order."""
    for folder in reversed(search):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def import_attribute(name: str, search: Sequence[Path]) -> Any:
    """Import "module:attribute" with `search` in front of Python's own path, where it then stays.

    Raises ImportError that says what is missing: the module, the attribute, or what the module's code raised.
    """
    extend_path(search)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ImportError(
                f"module {module_name!r} itself imports {error.name!r}, not installed"
            ) from error
        where = ", ".join(str(folder) for folder in search)
        raise ImportError(f"no module {error.name!r} in {where} or among the installed packages") from error
    except Exception as error:
        raise ImportError(f"importing {module_name!r} raised {raised(error, search)}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ImportError(f"{module_name!r} has no {attribute!r}{nearest(attribute, public)}") from None


def load_task(spec: TaskSpec, search: Sequence[Path]) -> Task:
    """The job's task, constructed. Raises JobError at task.class or task.args."""
    from worldline.task import Task

    try:
        found = import_attribute(spec.class_, search)
    except ImportError as error:
        raise JobError([f"task.class: {error}"]) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise JobError([f"task.class: expected a subclass of worldline.Task, found {found!r}"])
    if missing := sorted(found.__abstractmethods__):
        raise JobError([f"task.class: {spec.class_} must define {', '.join(missing)}"])
    parameters = inspect.signature(found).parameters
    if faults := list(_argument_faults(parameters, spec.args)):
        raise JobError(faults)
    try:
        return found(**spec.args)
    except Exception as error:
        raise JobError([f"task.args: {spec.class_} raised {raised(error, search)}"]) from error


def identity(job: Job) -> dict[str, str]:
    """What makes a job the same training line: dotted key -> value as JSON, defaults left out.

    Everything that decides a step's numbers is here. What may change between two attempts is not: where and
    on how many workers it runs, how its rows travel, how long it goes on, where it is stored and watched.
    """
    kept = job.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={
            "task": True,
            "data": {"train", "validation", "shuffle", "window_rows"},
            "batch": True,
            "gradient": True,
            "precision": True,
            "mode": True,
            "seed": True,
            "world": {"threads"},
        },
    )
    return dict(_flat(kept))


def job_digest(job: Job) -> str:
    """SHA-256 over `identity`, hexadecimal."""
    return hashlib.sha256(json.dumps(identity(job), sort_keys=True).encode()).hexdigest()


class _Loader(yaml.SafeLoader):
    """YAML as a job's author means it: 1e-3 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of keys with values. Raises JobError."""
    try:
        raw = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError([f"{path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise JobError([f"{path}: expected UTF-8 text, found byte {error.object[error.start]:#x}"]) from error
    except yaml.YAMLError as error:
        raise JobError([f"{path}{_yaml_problem(error)}"]) from error
    if not isinstance(raw, dict):
        raise JobError(
            [f"{path}: expected keys with values, found {'nothing' if raw is None else repr(raw)}"]
        )
    return raw


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f", line {error.problem_mark.line + 1}: {error.problem}"
    return f": {error}"


def _override(raw: dict[str, Any], override: str) -> str | None:
    """Lay one `a.b=value` into `raw`; its fault, if any. Whether the key exists is checked with the whole."""
    key, equals, text = override.partition("=")
    if not (equals and key):
        return f"--set {override}: expected KEY=VALUE"
    try:
        value = _parse(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        return f"--set {override}: the value is not YAML: {problem}"
    *parents, last = key.split(".")
    section = raw
    for depth, parent in enumerate(parents, start=1):
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            return f"--set {override}: {'.'.join(parents[:depth])} has no keys"
    section[last] = value
    return None


def _argument_faults(parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any]) -> Iterator[str]:
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {name: p for name, p in parameters.items() if p.kind in keyword}
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in args:
        if name not in accepted and not anything:
            yield f"task.args.{name}: unknown argument{nearest(name, accepted)}"
    for name, parameter in accepted.items():
        if name not in args and parameter.default is inspect.Parameter.empty:
            yield f"task.args.{name}: expected a value, found none; the task has no default for it"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value, sort_keys=True)
