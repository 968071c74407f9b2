"""Fixtures of the cluster tests: one Ray head for all runs, their rows, and the lines nobody disturbed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cases import Case, Settings
from tests.cluster.command import Fork, Script
from tests.cluster.forks import Forks
from tests.cluster.nodes import Nodes
from tests.cluster.on_nodes import OnNodes
from tests.cluster.records import Record
from tests.cluster.scenario import NEVER, Scenario


@pytest.fixture(scope="session")
def root() -> Iterator[Path]:
    """A short path: Ray's sockets lie below."""
    folder = Path(tempfile.mkdtemp(prefix="wl-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def forks(root: Path) -> Iterator[Forks]:
    forks = Forks(root / "forks")
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def head(root: Path, forks: Forks) -> Iterator[str]:
    """The address of a Ray cluster that the runs share: a worker takes its time to start, Ray need not."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(root / "ray"))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in forks.environment.items():
            patch.setenv(name, value)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 16,
                "include_dashboard": False,
                "include_log_monitor": False,
                "object_store_memory": 200 * 2**20,
                **forks.node_arguments,
            },
        )
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="session")
def rows(root: Path) -> Callable[[Case], Path]:
    """The folder of a case's rows, written when first asked for."""

    def folder(case: Case) -> Path:
        path = root / "rows" / case.name.replace(" ", "-")
        if not path.exists():
            path.mkdir(parents=True)
            case.rows(path)
        return path

    return folder


Make = Callable[..., Scenario]


@pytest.fixture(scope="session")
def make(root: Path, rows: Callable[[Case], Path]) -> Make:
    made: list[Scenario] = []

    def make(
        case: Case, address: str | None, settings: Settings, kind: Callable[..., Scenario] = Scenario
    ) -> Scenario:
        """address: of the Ray it joins; None: through the installed command, with a Ray of its own."""
        folder = root / f"s{len(made)}"
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(folder)}
        environment.pop("RAY_ADDRESS", None)
        if address is not None:
            environment["RAY_ADDRESS"] = address
        run = kind(case, folder, rows(case), Fork if address else Script, environment, settings)
        made.append(run)
        return run

    return make


@pytest.fixture
def scenario(make: Make, request: pytest.FixtureRequest) -> Iterator[Callable[..., Scenario]]:
    """(case, workers, settings) -> a run of the case that the test can drive.

    as_a_user: through the installed command and with a Ray of its own, instead of what costs less.
    """
    begun: list[Scenario] = []

    def begin(case: Case, workers: int = 1, as_a_user: bool = False, **settings: Any) -> Scenario:
        address = None if as_a_user else request.getfixturevalue("head")
        run = make(case, address, settings_of(case, workers, settings))
        begun.append(run)
        return run

    yield begin
    for run in begun:
        run.close()


@pytest.fixture(scope="session")
def fleet(root: Path, forks: Forks) -> Iterator[Nodes]:
    """Three nodes with room for a worker each, and a head without; started once."""
    nodes = Nodes(root / "nodes", num=3, forks=forks)
    yield nodes
    nodes.close()


@pytest.fixture
def nodes(fleet: Nodes) -> Nodes:
    """The cluster, whole, whatever an earlier test did to it."""
    fleet.make_whole()
    return fleet


@pytest.fixture
def on_nodes(make: Make, nodes: Nodes) -> Iterator[Callable[..., OnNodes]]:
    """(case, workers, settings) -> a run of the case on `nodes`, which leaves nothing there."""
    begun: list[OnNodes] = []

    def begin(case: Case, workers: int = 3, **settings: Any) -> OnNodes:
        run = make(case, nodes.address, settings_of(case, workers, settings), partial(OnNodes, nodes))
        assert isinstance(run, OnNodes)
        begun.append(run)
        return run

    yield begin
    ended = all(run.ended for run in begun)
    for run in begun:
        run.close()
    if ended:
        nodes.check_idle()


def settings_of(case: Case, workers: int, settings: Settings) -> Settings:
    """Those that a test gave by keyword, `a__b` for a.b, with what each run on workers needs."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    paced = {"task.class": case.paced} if case.paced else {}
    return {"world.max": workers, **paced, **named}


@pytest.fixture(scope="session")
def undisturbed(make: Make, head: str) -> Callable[..., list[Record]]:
    """The line of a case trained by one worker that nothing befalls, without Ray Data; computed once."""
    lines: dict[Case, list[Record]] = {}

    def line(case: Case) -> list[Record]:
        if case not in lines:
            run = make(case, head, {"data.pipeline": "local"})
            try:
                lines[case] = run.spawn(gate=NEVER).finish().line
            finally:
                run.close()
        return lines[case]

    return line
