"""How long training stands still when a worker is killed and when its replacement joins.

Runs one job with four workers through the command line, kills random ranks by SIGKILL, and reads the answer
from the run's own logs. Every time is given beyond one step's own: (completion of the first step of the new
generation) minus (the kill, or the completion of the last step before the join) minus (the median step in
that world).

    python tests/bench/recovery.py [--kills 20] [--workers 4]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from data import write_rows
from mlp import WIDTH

HERE = Path(__file__).resolve().parent
DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wl-") as folder:
        run = Run(Path(folder), arguments.workers)
        try:
            kills = [run.kill(rank) for rank in ranks(arguments.kills, arguments.workers, arguments.seed)]
            run.stop()
        finally:
            run.end()
        report(kills, run.read("steps.jsonl"), run.read("events.jsonl"), arguments.workers)


def ranks(kills: int, workers: int, seed: int) -> list[int]:
    """Random ranks, rank 0 among them."""
    rng = random.Random(seed)
    return [0, *(rng.randrange(workers) for _ in range(kills - 1))]


class Run:
    """A live run driven from outside."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        write_rows(folder / "data", 65536, WIDTH)
        job = {
            "name": "recovery",
            "task": {"class": "mlp:Mlp"},
            "data": {"train": {"path": str(folder / "data")}},
            "batch": {"logical_shards": 8, "rows_per_shard": 32},
            "world": {"min": 1, "max": workers},
            "gradient": {"clip_norm": 1.0},
            "steps": 1_000_000,
            "checkpoint": {"every_steps": 100_000},
            "tracking": {"enabled": False},
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        worldline = Path(sys.executable).with_name("worldline")
        self._process = subprocess.Popen(
            [worldline, "run", folder / "job.yaml", "--storage", folder / "runs"],
            env=os.environ | {"PYTHONPATH": str(HERE), "RAY_TMPDIR": str(folder / "ray")},
            stderr=(folder / "log").open("w"),
        )

    def kill(self, rank: int) -> tuple[float, set[int]]:
        """Once the world is whole, let it run a while, then SIGKILL a rank: (Unix time, survivors' pids)."""
        status = self._whole()
        start = status["step"]
        while self._whole()["step"] < start + 10:
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.2))
        pids = {worker["rank"]: worker["pid"] for worker in self._whole()["workers"]}
        now = time.time()
        os.kill(pids[rank], signal.SIGKILL)
        survivors = set(pids.values()) - {pids[rank]}
        while self._status().get("world") != self._workers - 1:
            self._check(now)
        if not survivors <= {worker["pid"] for worker in self._status()["workers"]}:
            raise SystemExit("a survivor changed its process")
        return now, survivors

    def stop(self) -> None:
        self._whole()
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(DEADLINE_S) != 75:
            raise SystemExit(f"the run did not stop as asked: {(self._folder / 'log').read_text()[-2000:]}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / "runs" / "recovery" / name
        return [json.loads(line) for line in path.read_text().splitlines()]

    def _whole(self) -> dict[str, Any]:
        began = time.time()
        while (status := self._status()).get("state") != "RUNNING" or status["world"] != self._workers:
            self._check(began)
        return status

    def _check(self, began: float) -> None:
        if self._process.poll() is not None or time.time() - began > DEADLINE_S:
            raise SystemExit(f"the run is stuck: {(self._folder / 'log').read_text()[-2000:]}")
        time.sleep(0.02)

    def _status(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(
                (self._folder / "runs" / "recovery" / "status.json").read_text()
            )
        except FileNotFoundError:
            return {}
        return content


def report(
    kills: list[tuple[float, set[int]]],
    steps: list[dict[str, Any]],
    events: list[dict[str, Any]],
    workers: int,
) -> None:
    numbers = [step["step"] for step in steps]
    first = {}
    for step in steps:
        first.setdefault(step["generation"], step)
    own = {
        world: statistics.median(s["step_s"] for s in steps if s["world"] == world)
        for world in {s["world"] for s in steps}
    }
    losses, joins = [], []
    before = None
    for step in steps:
        if before is not None and step["generation"] != before["generation"]:
            if step["world"] < before["world"]:
                killed = max(when for when, _ in kills if when < step["time"])
                losses.append(step["time"] - killed - own[step["world"]])
            else:
                joins.append(step["time"] - before["time"] - own[step["world"]])
        before = step
    redone = len(numbers) - len(set(numbers))
    restored = sum(event["kind"] == "restored" for event in events)
    print(f"{len(steps)} steps of {own[workers] * 1e3:.0f} ms with {workers} workers, {len(kills)} kills")
    print(f"completed steps redone: {redone}; checkpoints read: {restored}; survivors kept their processes")
    show("kill to next step", losses)
    show("join, standing still", joins)


def show(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    line = " ".join(f"{s * 1e3:.0f}" for s in ordered)
    print(
        f"{name}, beyond one step: median {statistics.median(ordered) * 1e3:.0f} ms, "
        f"worst {ordered[-1] * 1e3:.0f} ms ({len(ordered)}: {line})"
    )


if __name__ == "__main__":
    main()
