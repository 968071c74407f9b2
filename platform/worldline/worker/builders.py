"""What a task builds to be trained, checked: what no step could work with is refused before there is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from worldline.task import Task
from worldline.usercode import raised


class TaskError(Exception):
    """A fault of the job's own code that would come again on any worker; says what, where, what instead."""


class Training(NamedTuple):
    """What a task built: on the device, under the seed that was set before."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None


def build_training(task: Task, device: torch.device, search: Sequence[Path] = ()) -> Training:
    """Call the task's builders in their order. search: folders that places in the task's code are told from.

    Raises TaskError where a builder raises or returns what cannot be trained.
    """

    model = build_model(task, search).to(device)
    optimizer = _call(search, task.build_optimizer, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"{_name(task.build_optimizer)} must return a torch.optim.Optimizer, not {_kind(optimizer)}"
        )
    if needed := missing_arguments(optimizer):
        raise TaskError(
            f"{_kind(optimizer)}.step needs {needed}, and is called without: the gradients, summed over all "
            "workers, are there when it is. Use an optimizer whose step needs nothing, such as AdamW or SGD"
        )
    scheduler = _call(search, task.build_scheduler, optimizer)
    if scheduler is not None and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise TaskError(
            f"{_name(task.build_scheduler)} must return a torch.optim.lr_scheduler.LRScheduler or None, "
            f"not {_kind(scheduler)}"
        )
    if scheduler is not None and (needed := missing_arguments(scheduler)):
        raise TaskError(
            f"{_kind(scheduler)}.step needs {needed}, and is called without, once a step. Use a scheduler "
            "that depends on the step alone, such as CosineAnnealingLR or LambdaLR"
        )
    return Training(model, optimizer, scheduler)


def build_model(task: Task, search: Sequence[Path] = ()) -> torch.nn.Module:
    """The model alone. Raises TaskError."""
    model = _call(search, task.build_model)
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"{_name(task.build_model)} must return a torch.nn.Module, not {_kind(model)}")
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError(f"{_name(task.build_model)} returned a model without trainable parameters")
    return model


def missing_arguments(steppable: torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler) -> str:
    """What `step()` without arguments would lack; empty where it lacks nothing, or does not tell."""
    # The class's: an instance's own may be a scheduler's wrapper.
    try:
        parameters = list(inspect.signature(type(steppable).step).parameters.values())[1:]
    except ValueError:
        return ""
    of_no_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in of_no_number]
    return " and ".join(needed)


def _call(search: Sequence[Path], build: Callable[..., object], *args: object) -> object:
    try:
        return build(*args)
    except Exception as error:
        raise TaskError(f"{_name(build)} raised {raised(error, search)}") from error


def _name(build: Callable[..., object]) -> str:
    return f"{type(build.__self__).__name__}.{build.__name__}" if inspect.ismethod(build) else build.__name__


def _kind(value: object) -> str:
    return type(value).__name__
