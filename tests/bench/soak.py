"""A long run that is harmed at random: does it end well, on the same line, and does nothing grow?

Runs one job with 1 to 4 workers through the command line, with a fault script that kills, stops, drains, adds
and removes workers every 2 to 10 seconds, and looks at the driver's and the workers' processes from outside.
In the end it stops the run by `worldline stop` and trains as many steps again with one worker that nobody
disturbs. Exits 1 if the run did not end as asked or the two are not equal bit by bit. Growth is printed.

    python tests/bench/soak.py [--minutes 30] [--seed 7]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from data import write_rows
from growth import Sample, growth, measure, table, together
from mlp import WIDTH

from worldline.exits import TRY_AGAIN
from worldline.tracking.jsonl import Follower
from worldline.tracking.log import read_steps
from worldline.tracking.verify import compare

HERE = Path(__file__).resolve().parent
WORLDLINE = Path(sys.executable).with_name("worldline")
RUN, ALONE = "soak", "alone"
START_S = 180.0
STOP_S = 120.0
STEP_S = 0.2
"""The longest a step of the undisturbed run takes on the mean."""
LONGEST = 12
"""Workers that are shown: those who lived through most regroups."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two looks")
    parser.add_argument("--faults", type=float, nargs=2, default=(2.0, 10.0), metavar="SECONDS")
    parser.add_argument("--kinds", nargs="+", default=["kill", "stop", "drain", "add", "remove"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wl-", ignore_cleanup_errors=True) as folder:
        soak = Soak(Path(folder))
        soak.prepare(arguments.seed, arguments.faults, arguments.kinds)
        try:
            samples = soak.run(arguments.minutes * 60, arguments.every)
            steps = soak.stop()
            soak.alone(steps)
        finally:
            soak.end()
        soak.report(samples)
        sys.exit(soak.verdict(steps))


class Soak:
    """Two runs of one job in a folder: one disturbed, one not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = Follower(self.path(RUN) / "events.jsonl")
        self._kinds: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes] | None = None
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        self._environment = os.environ | {"PYTHONPATH": path, "RAY_TMPDIR": str(folder / "ray")}

    def path(self, run: str) -> Path:
        return self._folder / "runs" / run

    def prepare(self, seed: int, every_s: tuple[float, float], kinds: list[str]) -> None:
        write_rows(self._folder / "data", 65536, WIDTH)
        job = {
            "name": RUN,
            "task": {"class": "mlp:Mlp", "args": {"hidden": 64, "pause_s": 0.02}},
            "data": {"train": {"path": str(self._folder / "data")}},
            "batch": {"logical_shards": 4, "rows_per_shard": 16},
            "world": {"min": 1, "max": 4},
            "gradient": {"clip_norm": 1.0},
            "steps": 100_000_000,
            "checkpoint": {"every_steps": 500, "keep": 2},
            "tracking": {"enabled": False},
            "failure": {"timeout_s": 30},
        }
        (self._folder / "job.yaml").write_text(json.dumps(job))
        chaos = {"random": {"seed": seed, "every_s": list(every_s), "kinds": kinds}}
        (self._folder / "chaos.yaml").write_text(json.dumps(chaos))

    def run(self, seconds: float, every_s: float) -> list[Sample]:
        """Let it train for so long, and look at it."""
        self._start("run", self._folder / "job.yaml", "--chaos", self._folder / "chaos.yaml")
        began = time.monotonic()
        while self._status().get("state") != "RUNNING":
            self._check(began + START_S, "did not begin")
        samples: list[Sample] = []
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._check(until + every_s, "")
            samples += self._look()
            time.sleep(max(0.0, min(now + every_s, until) - time.monotonic()))
        return samples

    def stop(self) -> int:
        """End it as an operator does. Returns the number of its completed steps."""
        stop = subprocess.run(
            [WORLDLINE, "stop", RUN, "--storage", self._folder / "runs", "--json", "--timeout", str(STOP_S)],
            env=self._environment,
            stdout=subprocess.PIPE,
            check=False,
        )
        assert self._process is not None
        if stop.returncode != 0 or self._process.wait(STOP_S) != TRY_AGAIN:
            self._fail(f"did not stop as asked (exit {stop.returncode}, {self._process.poll()})")
        self._look()
        step: int = json.loads(stop.stdout)["step"]
        return step

    def alone(self, steps: int) -> None:
        """The same steps by one worker that nothing befalls, and that does not pause."""
        settings = {"name": ALONE, "steps": steps, "world.max": 1, "task.args.pause_s": 0}
        sets = [f"--set={key}={value}" for key, value in settings.items()]
        self._start("run", self._folder / "job.yaml", *sets)
        assert self._process is not None
        try:
            code = self._process.wait(START_S + steps * STEP_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            self._fail(f"of {steps} steps alone did not end well (exit {code})")

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def report(self, samples: list[Sample]) -> None:
        for kind, num in sorted(self._kinds.items()):
            print(f"{num:>6} {kind}")
        rows = sorted(growth(samples), key=lambda row: (row.process != "driver", -row.regroups))
        print("\n".join(table(rows[: 1 + LONGEST])))
        workers = [sample for sample in samples if sample.process != "driver"]
        slopes = together(workers)
        if slopes is not None:
            memory, threads, files = slopes
            print(f"workers, a regroup: {memory:+.1f} KiB, {threads:+.3f} threads, {files:+.3f} files")

    def verdict(self, steps: int) -> int:
        runs = [read_steps(self.path(run) / "steps.jsonl") for run in (RUN, ALONE)]
        result = compare(*runs)
        digests = [self._digest(run, steps) for run in (RUN, ALONE)]
        print(f"{result.num_common} common steps of {steps}, {result.num_digests} with digests of the state")
        print(f"digests of the state of step {steps}: {' '.join(map(str, digests))}")
        if result.difference is not None:
            print(f"different: {result.difference}")
            return 1
        if result.num_common != steps or digests[0] is None or digests[0] != digests[1]:
            print("not proven equal")
            return 1
        print("equal, bit by bit")
        return 0

    def _digest(self, run: str, step: int) -> str | None:
        """Of the state in the checkpoint of `step`."""
        try:
            path = self.path(run) / "checkpoints" / f"step-{step:08}" / "manifest.json"
            digest: str = json.loads(path.read_text())["state_digest"]
        except FileNotFoundError:
            return None
        return digest

    def _look(self) -> list[Sample]:
        """A sample of the driver and of each member."""
        for event in self._events.read():
            kind = event["kind"]
            injected = kind == "fault_injected"
            self._kinds[f"fault: {_kind_of(event['reason'])}" if injected else kind] += 1
        regroups = self._kinds["generation_formed"]
        status = self._status()
        pids = {"driver": status["driver"]["pid"]} if "driver" in status else {}
        pids |= {f"worker {worker['pid']}": worker["pid"] for worker in status.get("workers", ())}
        measured = {name: measure(pid) for name, pid in pids.items()}
        return [Sample(name, regroups, values) for name, values in measured.items() if values is not None]

    def _start(self, *arguments: str | Path) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [WORLDLINE, *arguments, "--storage", self._folder / "runs"],
                env=self._environment,
                stderr=log,
            )

    def _status(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path(RUN) / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return content

    def _check(self, deadline: float, what: str) -> None:
        """Sleeps a moment; ends the soak if the run has ended or the deadline is over."""
        assert self._process is not None
        if self._process.poll() is not None:
            self._fail(f"ended by itself, exit code {self._process.returncode}")
        if time.monotonic() > deadline:
            self._fail(what)
        time.sleep(0.05)

    def _fail(self, what: str) -> None:
        print((self._folder / "log").read_text()[-4000:], file=sys.stderr)
        raise SystemExit(f"the run {what}")


def _kind_of(reason: str) -> str:
    """The first word or two of what a fault is, without whom it befalls."""
    if reason.startswith(("SIG", "no ")):
        return " ".join(reason.replace(":", "").split()[: 2 if reason.startswith("no ") else 1])
    return "drain" if "has to leave" in reason else "resize refused" if "refused" in reason else "resize"


if __name__ == "__main__":
    main()
