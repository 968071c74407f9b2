"""The user's transform: found by name, known by its source."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import types

from worldline.data.block import Transform
from worldline.data.manifest import DataError
from worldline.usercode import raised


def load_transform(name: str) -> Transform:
    """The function that "module:function" names."""
    module_name, _, function_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        # Where the module was found, what is missing is something that it imports.
        not_found = error.name is not None and module_name.startswith(error.name)
        hint = ": is its folder the job file's or the working directory?" if not_found else ""
        raise DataError(f"cannot import transform {name!r}: {error}{hint}") from error
    except AttributeError:
        raise DataError(
            f"module {module_name!r} has no function {function_name!r}, named as transform"
        ) from None
    except Exception as error:
        raise DataError(
            f"importing {module_name!r}, where transform {name!r} is, raised {raised(error)}"
        ) from error
    if not callable(found):
        raise DataError(f"transform {name!r} is not a function")
    transform: Transform = found
    return transform


def transform_digest(transform: Transform) -> str:
    """SHA-256 of the transform's source and of what it uses from its own module.

    Used functions and classes count with their source, plain constants with their value. What it uses from
    other modules does not count: a change there goes unnoticed.
    """
    names = vars(sys.modules[transform.__module__])
    start = transform if isinstance(transform, types.FunctionType) else type(transform)
    content: dict[str, str] = {}
    pending: list[tuple[str, object]] = [(start.__qualname__, start)]
    while pending:
        name, value = pending.pop()
        if name in content:
            continue
        if isinstance(value, types.FunctionType | type) and value.__module__ == transform.__module__:
            content[name] = inspect.getsource(value)
            codes = (
                [value.__code__]
                if isinstance(value, types.FunctionType)
                else [f.__code__ for f in vars(value).values() if isinstance(f, types.FunctionType)]
            )
            pending += [(n, names[n]) for code in codes for n in _global_names(code) if n in names]
        elif isinstance(value, int | float | str | bytes | tuple):
            content[name] = repr(value)
    return hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()


def _global_names(code: types.CodeType) -> set[str]:
    """Names the code and the functions inside it look up outside themselves."""
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_global_names, nested))
