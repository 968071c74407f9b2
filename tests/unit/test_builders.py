"""What a task builds is refused at once where no step could work with it, and taken where one can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from worldline.task import Task
from worldline.worker.builders import TaskError, build_training

HERE = Path(__file__).parent


class Built(Task):
    """Builds what it is given."""

    def __init__(
        self,
        optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler: Callable[[Any], Any] = lambda optimizer: None,
        model: Callable[[], Any] = lambda: nn.Linear(3, 1),
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler

    def build_model(self) -> nn.Module:
        return self._model()  # type: ignore[no-any-return]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._optimizer(model.parameters())  # type: ignore[no-any-return]

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler | None:
        return self._scheduler(optimizer)  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise AssertionError


def build(**builders: Any) -> Any:
    return build_training(Built(**builders), torch.device("cpu"), [HERE])


class Counted(torch.optim.SGD):
    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:
        super().step(closure)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        torch.optim.Adafactor,
        torch.optim.Rprop,
        Counted,
        lambda p: lr_scheduler.StepLR(torch.optim.SGD(p), 2).optimizer,  # whose `step` is wrapped
    ],
    ids=["adamw", "adafactor", "rprop", "own", "wrapped"],
)
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: None,
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], milestones=[3]
        ),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2)], optimizer=o),
    ],
    ids=["none", "cosine", "sequential", "chained"],
)
def test_what_steps_by_itself_is_taken(optimizer: Any, scheduler: Any) -> None:
    model, optimizer, scheduler = build(optimizer=optimizer, scheduler=scheduler)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


class OwnClosure(torch.optim.SGD):
    def step(self, closure: Any, *, scale: float) -> None:  # type: ignore[override]
        raise AssertionError


def test_an_optimizer_that_needs_a_closure() -> None:
    for optimizer, needed in ((torch.optim.LBFGS, "closure"), (OwnClosure, "closure and scale")):
        with pytest.raises(TaskError) as caught:
            build(optimizer=optimizer)
        said = str(caught.value)
        assert said.startswith(f"{optimizer.__name__}.step needs {needed}, and is called without")
        assert said.endswith("Use an optimizer whose step needs nothing, such as AdamW or SGD")


def test_a_scheduler_that_needs_a_metric() -> None:
    with pytest.raises(TaskError, match=r"^ReduceLROnPlateau.step needs metrics, .*CosineAnnealingLR"):
        build(scheduler=lr_scheduler.ReduceLROnPlateau)


@pytest.mark.parametrize(
    ("builders", "fault"),
    [
        ({"model": lambda: None}, "Built.build_model must return a torch.nn.Module, not NoneType"),
        ({"model": nn.ReLU}, "Built.build_model returned a model without trainable parameters"),
        (
            {"optimizer": lambda p: list(p)},
            "Built.build_optimizer must return a torch.optim.Optimizer, not list",
        ),
        (
            {"scheduler": lambda o: 3},
            "Built.build_scheduler must return a torch.optim.lr_scheduler.LRScheduler or None, not int",
        ),
    ],
    ids=["model", "parameters", "optimizer", "scheduler"],
)
def test_what_is_nothing_to_train(builders: Any, fault: str) -> None:
    with pytest.raises(TaskError) as caught:
        build(**builders)
    assert str(caught.value) == fault


def refuse(*_: object) -> None:
    raise ValueError("not today")


@pytest.mark.parametrize("which", ["model", "optimizer", "scheduler"])
def test_a_builder_that_raises_is_told_with_its_place(which: str) -> None:
    line = refuse.__code__.co_firstlineno + 1
    with pytest.raises(TaskError) as caught:
        build(**{which: refuse})
    assert str(caught.value) == (
        f"Built.build_{which} raised ValueError: not today (test_builders.py:{line}, in refuse)"
    )
