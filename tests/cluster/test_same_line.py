"""One line, whatever the world: losses, norms, rows, weights and optimizer of every step, bit by bit."""

from __future__ import annotations

import pytest
from tests.cluster.cases import EVERYTHING

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_worlds_of_any_size(scenario, undisturbed, workers: int) -> None:
    run = scenario(EVERYTHING, workers, world__min=workers).start().finish()
    assert run.worlds == {workers}
    assert run.line == undisturbed(EVERYTHING)
