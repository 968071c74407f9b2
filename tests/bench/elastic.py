"""How long training stands still when the world changes, on a cluster of several nodes on one machine.

Four workers, a node each, run through the command line with Ray's real raylets; workers are killed and
frozen, nodes are switched off, drained and unplugged, one after another, each once the world is whole again.
Every time is the longest one without a completed step around the change, beyond the usual time of a step.

    python tests/bench/elastic.py [--times 10] [--kinds killed lost drained frozen unplugged]

`unplugged` needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import write_rows
from mlp import WIDTH
from tests.cluster.link import Link
from tests.cluster.nodes import Node, Nodes

HERE = Path(__file__).resolve().parent
WORKERS = 4
LEAD_S = 20.0
DEADLINE_S = 180.0
SETTLED_STEPS = 15
KINDS = ("killed", "lost", "drained", "frozen", "unplugged")
Record = dict[str, Any]


@dataclass
class Fault:
    """What was done to whose worker at which Unix time; survivors: pids that must still be there."""

    kind: str
    time: float
    rank: int
    survivors: set[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="wl-", dir="/tmp") as folder:
        nodes = Nodes(Path(folder) / "ray", num=WORKERS)
        run = None
        try:
            run = Run(Path(folder), nodes)
            for number in range(arguments.times):
                for kind in arguments.kinds:
                    run.strike(kind, number % WORKERS)
            run.stop()
        finally:
            if run is not None:
                run.end()
                report(run)
            nodes.close()


class Run:
    """A live run, driven from outside."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self._folder = folder
        self._nodes = nodes
        self.faults: list[Fault] = []
        self.joins = [(0.0, "joined at the start")]  # from when on who joins is called what
        write_rows(folder / "data", 65536, WIDTH)
        job = {
            "name": "elastic",
            "task": {"class": "mlp:Mlp"},
            "data": {"train": {"path": str(folder / "data")}},
            "batch": {"logical_shards": 8, "rows_per_shard": 32},
            "world": {"min": 1, "max": WORKERS},
            "gradient": {"clip_norm": 1.0},
            "steps": 1_000_000,
            "checkpoint": {"every_steps": 100_000},
            "tracking": {"enabled": False},
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        shutil.copy(HERE / "mlp.py", folder)
        environment = {"RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled"}
        self._process = subprocess.Popen(
            [Path(sys.executable).with_name("worldline"), "run", folder / "job.yaml", "--storage", folder],
            env=os.environ | environment | {"RAY_TMPDIR": str(nodes.folder)},
            stderr=(folder / "log").open("w"),
        )

    def strike(self, kind: str, rank: int) -> None:
        """Once the world is whole and runs quietly; afterwards there is a place for another worker."""
        link = Link(self._nodes.machine) if kind == "unplugged" else None
        if link is not None:
            rank = self._move_to(link)
        status = self._quiet()
        worker = next(w for w in status["workers"] if w["rank"] == rank)
        survivors = {w["pid"] for w in status["workers"]} - {worker["pid"]}
        node = self._nodes[worker["node"]]
        self.faults.append(Fault(kind, time.time(), rank, survivors))
        self.joins.append((time.time(), f"joined after {kind}"))
        generation = status["generation"]
        self._harm(kind, worker["pid"], node)
        now = self._wait(
            lambda s: s["generation"] > generation and s["state"] == "RUNNING", f"{kind}: going on"
        )
        if not survivors <= {w["pid"] for w in now["workers"]}:
            raise SystemExit(f"{kind}: a survivor changed its process")
        if kind in ("frozen", "killed"):
            return
        self._nodes.lose(node) if link is None else link.plug()
        self._nodes.make_whole()

    def _harm(self, kind: str, pid: int, node: Node) -> None:
        match kind:
            case "killed":
                os.kill(pid, signal.SIGKILL)
            case "frozen":
                os.kill(pid, signal.SIGSTOP)
            case "lost":
                self._nodes.lose(node)
            case "drained":
                self._nodes.drain(node, LEAD_S)
            case "unplugged":
                assert node.link is not None
                node.link.pull()

    def _move_to(self, link: Link) -> int:
        """Have a worker on a node behind this link: its rank."""
        status = self._quiet()
        self._nodes.lose(self._nodes[status["workers"][-1]["node"]])
        self.joins.append((time.time(), "joined from behind a link"))
        node = self._nodes.add(link=link)
        found = self._wait(
            lambda s: s["state"] == "RUNNING" and any(w["node"] == node.id for w in s["workers"]), "the move"
        )
        return next(w["rank"] for w in found["workers"] if w["node"] == node.id)

    def _quiet(self) -> Record:
        whole = self._whole()
        return self._wait(
            lambda s: s["step"] >= whole["step"] + SETTLED_STEPS and s["world"] == WORKERS, "quiet steps"
        )

    def _whole(self) -> Record:
        return self._wait(lambda s: s["state"] == "RUNNING" and s["world"] == WORKERS, "a whole world")

    def _wait(self, condition: Callable[[Record], bool], what: str) -> Record:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            status = self._status()
            if status and len(status["workers"]) == status["world"] and condition(status):
                return status
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self._folder / "log").read_text()[-2000:]
                raise SystemExit(f"{what} did not come: {status}\n{log}")
            time.sleep(0.02)

    def stop(self) -> None:
        self._quiet()
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(DEADLINE_S) != 75:
            raise SystemExit(f"the run did not stop as asked: {(self._folder / 'log').read_text()[-2000:]}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def read(self, name: str) -> list[Record]:
        return [json.loads(line) for line in (self._folder / "elastic" / name).read_text().splitlines()]

    def _status(self) -> Record:
        try:
            content: Record = json.loads((self._folder / "elastic" / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return content


def report(run: Run) -> None:
    steps, events = run.read("steps.jsonl"), run.read("events.jsonl")
    own = {
        world: statistics.median(s["step_s"] for s in steps if s["world"] == world)
        for world in {s["world"] for s in steps}
    }
    stood: dict[str, list[float]] = {}
    left_s: list[float] = []
    open_faults = list(run.faults)
    for before, step in pairwise(steps):
        if step["generation"] == before["generation"]:
            continue
        kind = "lost, to move"
        if step["world"] > before["world"]:
            kind = [name for since, name in run.joins if since < step["time"]][-1]
        if open_faults and open_faults[0].time < step["time"] and step["world"] <= before["world"]:
            fault = open_faults.pop(0)
            kind = fault.kind
            if kind == "drained":
                left_s.append(step["time"] - fault.time)
        stood.setdefault(kind, []).append(step["time"] - before["time"] - own[step["world"]])
    numbers = [step["step"] for step in steps]
    redone = len(numbers) - len(set(numbers))
    restored = sum(event["kind"] == "restored" for event in events)
    print(
        f"{len(steps)} steps of {own[WORKERS] * 1e3:.0f} ms with {WORKERS} workers; {len(run.faults)} faults"
    )
    print(f"completed steps redone: {redone}; checkpoints read: {restored}; survivors kept their processes")
    for kind, seconds in stood.items():
        ordered = sorted(seconds)
        line = " ".join(f"{s:.2f}" for s in ordered)
        median = statistics.median(ordered)
        print(f"{kind:25} median {median:.2f} s, worst {ordered[-1]:.2f} s beyond one step ({line})")
    if left_s:
        print(f"drained nodes were left after {min(left_s):.1f} to {max(left_s):.1f} s of {LEAD_S:g}")


if __name__ == "__main__":
    main()
