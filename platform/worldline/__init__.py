"""Elastic training on Ray: the world may change, the training does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldline.api import train
    from worldline.control.launch import Result
    from worldline.job.spec import Job
    from worldline.task import Batch, Loss, Peers, Task

__all__ = ["Batch", "Job", "Loss", "Peers", "Result", "Task", "train"]

_HOMES = {
    "Batch": "worldline.task",
    "Loss": "worldline.task",
    "Peers": "worldline.task",
    "Task": "worldline.task",
    "Job": "worldline.job.spec",
    "Result": "worldline.control.launch",
    "train": "worldline.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a command that only looks at a run need not load torch and Ray."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
