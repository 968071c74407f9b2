"""Nodes on which something is not as it should be.

| what must hold | report |
| --- | --- |
| a worker that ran out of memory is named as that, and twice at one step is an end | F5 |
| two nodes that cannot reach each other are named before the first step | F14 |

Wrong names of network interfaces (F14) are in the environment of all nodes of these tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.cases import EVERYTHING
from tests.cluster.link import link_or_skip

pytestmark = pytest.mark.cluster

ROOM = 2.5 * 2**30


def test_out_of_memory(on_nodes, nodes) -> None:
    """Ray's memory monitor kills the worker, each time at the same step: that is not tried for ever."""
    total, used = memory()
    limit = {"RAY_memory_usage_threshold": f"{(used + ROOM) / total:.4f}"}
    limit["RAY_memory_monitor_refresh_ms"] = "50"
    nodes.add(num_cpus=2, environment=limit)
    run = on_nodes(EVERYTHING, workers=1, world__cpus_per_worker=2)
    (run.folder / "fault").write_text("eat 5")
    run.spawn(gate=40).finish(code=1)
    assert len(run.steps) == 4
    assert "out of memory" in run.last_word
    assert "rank 0" in run.last_word
    assert "twice" in run.last_word


def test_nodes_that_cannot_reach_each_other(on_nodes, nodes) -> None:
    links = []
    for _ in range(2):
        links.append(link_or_skip(nodes.machine))
        nodes.add(num_cpus=2, link=links[-1])
    run = on_nodes(EVERYTHING, workers=2, world__min=2, world__cpus_per_worker=2, failure__no_progress=1)
    run.spawn(gate=40)
    run.until(lambda: len(run.events("worker_ready")) == 2, "two workers")
    run.until(lambda: run.ended, "a word", or_ended=True)
    assert all(link.address in run.last_word for link in links)


def memory() -> tuple[int, int]:
    """Bytes of the machine, and of them in use."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, total - available
