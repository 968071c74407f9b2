"""Fixtures for every test."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

# A deadline would measure the machine, not the code.
hypothesis.settings.register_profile("worldline", deadline=None)
hypothesis.settings.load_profile("worldline")


@pytest.fixture
def restore_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a worker sets for its whole process is set back: import path, torch's numeric settings, seeds."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads, seeds = (
        torch.get_num_threads(),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()),
    )
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.deterministic = False
    torch.set_num_threads(threads)
    torch.set_rng_state(seeds[0])
    random.setstate(seeds[1])
    np.random.set_state(seeds[2])
