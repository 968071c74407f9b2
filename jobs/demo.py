"""Train a small GPT with three workers, kill one, and prove that nothing was lost.

    python jobs/demo.py [--steps 300] [--kill-at 100] [--alone-steps 200]

The killed run's rows are then held against its plan, and its log, step by step and bit by bit, against that
of the same job trained by one worker that nobody disturbed. Exits 0 only if both come out right.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("stdlib-gpt.yaml")
WORLDLINE = Path(sys.executable).with_name("worldline")
STORAGE = Path("runs")
NAME, ALONE = "stdlib-gpt", "stdlib-gpt-alone"
DEADLINE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill one of three workers, prove that nothing was lost.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-at", type=int, default=100, help="the step after which a worker is killed")
    parser.add_argument("--alone-steps", type=int, default=200, help="steps of the undisturbed run")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, JOB.with_name("stdlib_text.py")], check=True)

    title(f"Three workers; one is killed after step {arguments.kill_at}")
    with running(NAME, arguments.steps, workers=3) as run:
        killed = kill_a_worker(run, arguments.kill_at)
        finish(run)

    title("The same job with one worker that nobody disturbs")
    with running(ALONE, arguments.alone_steps, workers=1) as run:
        finish(run)

    title("What the kill cost")
    for name, value in costs(read("steps.jsonl"), read("events.jsonl"), killed):
        print(f"{name:28} {value}", flush=True)
    title("What is proven")
    return max(worldline("audit", NAME), worldline("verify", NAME, ALONE), worldline("report", NAME))


@contextmanager
def running(name: str, steps: int, workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """`worldline run` of the job, from the beginning; stopped in order if this ends early."""
    settings = {"name": name, "steps": steps, "world.min": 1, "world.max": workers}
    command = [WORLDLINE, "run", JOB, "--storage", STORAGE, "--resume", "never"]
    run = subprocess.Popen([*command, *(f"--set={key}={value}" for key, value in settings.items())])
    try:
        yield run
    except BaseException:
        run.terminate()
        run.wait(60)
        raise


def kill_a_worker(run: subprocess.Popen[bytes], step: int) -> float:
    """SIGKILL rank 1 once `step` is completed by a world of several. Returns the Unix time of the kill."""
    began = time.monotonic()
    while True:
        status = read_status()
        pids = {worker["rank"]: worker["pid"] for worker in status.get("workers", ())}
        if status.get("step", 0) >= step and 1 in pids and status["state"] == "RUNNING":
            break
        if run.poll() is not None or time.monotonic() - began > DEADLINE_S:
            sys.exit(f"the run did not come to step {step} with several workers")
        time.sleep(0.05)
    os.kill(pids[1], signal.SIGKILL)
    return time.time()


def finish(run: subprocess.Popen[bytes]) -> None:
    try:
        code = run.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"the run did not end within {DEADLINE_S:g} s")
    if code != 0:
        sys.exit(f"the run failed with exit code {code}")


def costs(
    steps: list[dict[str, Any]], events: list[dict[str, Any]], killed: float
) -> Iterator[tuple[str, str]]:
    broken = max(step["generation"] for step in steps if step["time"] <= killed)
    before = max(step["step"] for step in steps if step["generation"] <= broken)
    after = next(step for step in steps if step["generation"] > broken)
    step_s = statistics.median(s["step_s"] for s in steps if s["generation"] == after["generation"])
    sizes = [steps[0]["world"], *(b["world"] for a, b in pairwise(steps) if a["world"] != b["world"])]
    yield "workers", " -> ".join(map(str, sizes))
    yield "kill to next completed step", f"{after['time'] - killed:.2f} s, the step itself {step_s:.2f} s"
    yield "went on with", f"step {after['step']}, after {before} completed ones"
    yield "checkpoints read", str(sum(event["kind"] == "restored" for event in events))
    yield "loss", f"{steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}"


def worldline(*arguments: str) -> int:
    """Run one command as anybody would; its exit code."""
    print(f"$ worldline {' '.join(arguments)}", flush=True)
    return subprocess.run([WORLDLINE, *arguments, "--storage", STORAGE]).returncode


def read_status() -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((STORAGE / NAME / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def read(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (STORAGE / NAME / log).read_text().splitlines()]


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
