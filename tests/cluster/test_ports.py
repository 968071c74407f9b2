"""Two runs on one cluster find ports, whoever else sits on them (F6)."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from tests.cluster.cases import EVERYTHING
from tests.cluster.processes import listening

pytestmark = pytest.mark.cluster

NEXT = 50


def test_regroups_where_the_next_ports_are_taken(scenario, undisturbed) -> None:
    """Before each regroup somebody takes the ports after each that the runs have used so far."""
    runs = [scenario(EVERYTHING, workers=2).spawn() for _ in range(2)]
    for run in runs:
        run.at(step=1).grow()
    for victim in (0, 1):
        pids = {pid for run in runs for pid in (*run.members.values(), run.status["driver"]["pid"])}
        used = {port for pid in pids for port in listening(pid)}
        assert used
        with squatters(port + i for port in used for i in range(1, NEXT)):
            for run in runs:
                run.kill(rank=victim)
            for run in runs:
                run.more(steps=1).grow()
    for run in runs:
        run.finish()
        assert not run.events("collective_failed")
        assert not run.events("worker_start_failed")
        assert run.line == undisturbed(EVERYTHING)


@contextmanager
def squatters(ports: Iterable[int]) -> Iterator[None]:
    with ExitStack() as stack:
        for port in ports:
            squatter = stack.enter_context(socket.socket())
            with suppress(OSError, OverflowError):
                squatter.bind(("", port))
                squatter.listen()
        yield
