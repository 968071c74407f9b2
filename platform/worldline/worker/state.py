"""Model, optimizer and scheduler as named tensors and a JSON tree, and back, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from worldline.tensors import dtype_name, tensor_bytes
from worldline.worker.encoding import (
    StateError,
    canonical_json,
    decode,
    decode_inline,
    encode,
    encode_inline,
)

__all__ = ["StateError", "Tensors", "TrainState", "digest", "snapshot"]

Tensors = Mapping[str, torch.Tensor]


class TrainState:
    """The whole training state of one worker.

    `tensors()` and `meta()` taken at one step border, given to `load` of a freshly built state of the same
    task, make it continue with the same bits. Tensors are named

        model/<name>                       parameters and persistent buffers, tied ones once
        optimizer/<parameter>/<key>        state that the optimizer keeps for the parameter
        extra/<module>/...                 tensors in a module's get_extra_state()

    and `meta()` holds the rest: parameter groups, numbers in the optimizer's state, the scheduler. Not held,
    because a step starts without them: gradients, random generators, buffers declared non-persistent.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in self._names:
                    raise StateError(
                        f"group {index} of the optimizer holds a parameter of shape {tuple(parameter.shape)} "
                        "that is not in the model; make it part of the module that build_model returns"
                    )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the live tensors, no copies: they change with the next step."""
        return self._encode()[0]

    def meta(self) -> dict[str, Any]:
        """A JSON tree, independent of the live state."""
        return self._encode()[1]

    def load(self, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        """Copy the state in: parameters and buffers keep their identity, nothing refers to `tensors` after.

        Raises StateError, and changes nothing, if the state does not fit.
        """
        own = self._model_tensors()
        self._check(own, tensors, meta)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self._load_optimizer(tensors, meta["optimizer"])
        on_host = partial(_copy, tensors, torch.device("cpu"))
        for name, module in _stateful_modules(self._model):
            module.set_extra_state(decode(meta["extra"][name], f"extra/{name}", on_host))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(decode(meta["scheduler"], "scheduler", decode_inline))

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        persistent = self._model.state_dict(keep_vars=True)
        tensors: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        tensors |= {name: buffer for name, buffer in self._model.named_buffers() if name in persistent}
        return {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}

    def _encode(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = self._model_tensors()

        def store(path: str, tensor: torch.Tensor) -> dict[str, Any]:
            if path in tensors:
                raise StateError(f"two tensors of the state are called {path}; rename the parameter")
            tensors[path] = tensor.detach()
            # The layout is part of the state: the rounding of a kernel may depend on it.
            return {} if tensor.is_contiguous() else {"stride": list(tensor.stride())}

        scheduler = self._scheduler
        state = {}
        for parameter, values in self._optimizer.state.items():
            name = self._names.get(parameter) if isinstance(parameter, torch.Tensor) else None
            if name is None:
                raise StateError(
                    f"the optimizer keeps state under {parameter!r}, which is no parameter of the model"
                )
            if values:
                state[name] = encode(values, f"optimizer/{name}", store)
        meta = {
            "optimizer": {
                "type": type(self._optimizer).__qualname__,
                "groups": self._groups(),
                "options": [
                    encode(_options(group), f"optimizer group {index}", encode_inline)
                    for index, group in enumerate(self._optimizer.param_groups)
                ],
                "state": state,
            },
            "scheduler_type": _type_name(self._scheduler),
            "scheduler": None
            if scheduler is None
            else encode(scheduler.state_dict(), "scheduler", encode_inline),
            "extra": {
                name: encode(module.get_extra_state(), f"extra/{name}", store)
                for name, module in _stateful_modules(self._model)
            },
        }
        return tensors, meta

    def _groups(self) -> list[list[str]]:
        return [[self._names[p] for p in group["params"]] for group in self._optimizer.param_groups]

    def _check(self, own: Tensors, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        stored: set[str] = set()

        def visit(path: str, content: Any) -> torch.Tensor:
            stored.add(path)
            return torch.empty(0)

        for name, values in meta["optimizer"]["state"].items():
            decode(values, f"optimizer/{name}", visit)
        for name, values in meta["extra"].items():
            decode(values, f"extra/{name}", visit)
        expected = own.keys() | stored
        problems = [f"missing {name}" for name in sorted(expected - tensors.keys())]
        problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected)]
        for name in sorted(own.keys() & tensors.keys()):
            here, there = _form(own[name]), _form(tensors[name])
            if here != there:
                problems.append(f"{name} is {there} in the state and {here} in the model")
        stateful = sorted(name for name, _ in _stateful_modules(self._model))
        for what, now, then in (
            ("optimizer", type(self._optimizer).__qualname__, meta["optimizer"]["type"]),
            ("optimizer's parameter groups", self._groups(), meta["optimizer"]["groups"]),
            ("scheduler", _type_name(self._scheduler), meta["scheduler_type"]),
            ("modules with extra state", stateful, sorted(meta["extra"])),
        ):
            if now != then:
                problems.append(f"the {what} {then} became {now}")
        if problems:
            more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise StateError(
                f"the state does not fit what the task builds: {'; '.join(problems[:10])}{more}. "
                "The definition of the model, optimizer or scheduler changed since the state was made: "
                "put it back or start a new run"
            )

    def _load_optimizer(self, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        # Not load_state_dict: it casts state to the parameter's dtype.
        parameters = {name: parameter for parameter, name in self._names.items()}
        self._optimizer.state.clear()
        for index, group in enumerate(self._optimizer.param_groups):
            options = decode(meta["options"][index], "", decode_inline)
            for key, value in options.items():
                current = group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                    value = value.to(current.device)
                group[key] = value
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            for name in meta["groups"][index]:
                if name in meta["state"]:
                    parameter, values, prefix = parameters[name], meta["state"][name], f"optimizer/{name}"
                    # The step counter lies where load_state_dict, too, would put it.
                    step_on_device = group.get("capturable") or group.get("fused")
                    on_host = None if step_on_device else f"{prefix}/step"
                    copy = partial(_copy, tensors, parameter.device, on_host=on_host)
                    self._optimizer.state[parameter] = decode(values, prefix, copy)


def digest(tensors: Tensors, meta: Mapping[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the tensors, and the tree."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor_bytes(tensor))
    sha.update(canonical_json(meta))
    return sha.hexdigest()


def snapshot(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies in host memory that no later step changes."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _stateful_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.get_extra_state
    return [(n, m) for n, m in model.named_modules() if type(m).get_extra_state is not plain]


def _copy(
    tensors: Tensors, device: torch.device, path: str, content: Mapping[str, Any], on_host: str | None = None
) -> torch.Tensor:
    """A copy on `device` of the tensor stored under `path`, in the layout it had; on the host for path
    `on_host`."""
    source = tensors[path]
    place = torch.device("cpu") if path == on_host else device
    if "stride" in content:
        target = torch.empty_strided(source.shape, content["stride"], dtype=source.dtype, device=place)
    else:
        target = torch.empty(source.shape, dtype=source.dtype, device=place)
    return target.copy_(source)


def _form(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _type_name(value: object) -> str | None:
    return None if value is None else type(value).__qualname__
