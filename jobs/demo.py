"""Train a small GPT with three workers, kill one, and show that nothing was lost.

    python jobs/demo.py [--steps 300] [--kill-at 100]

The killed run's log is then compared, step by step and bit by bit, with that of the same job trained by one worker
that nobody disturbed.
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
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("stdlib-gpt.yaml")
BIN = Path(sys.executable).parent
STORAGE = Path("runs")
DEADLINE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-at", type=int, default=100)
    parser.add_argument("--alone-steps", type=int, default=200, help="of the undisturbed run with one worker")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, JOB.with_name("stdlib_text.py")], check=True)

    title(f"Three workers, {arguments.steps} steps; one worker is killed at step {arguments.kill_at}")
    run = start("stdlib-gpt", arguments.steps, workers=3)
    killed = kill_a_worker(run, "stdlib-gpt", arguments.kill_at)
    finish(run)

    title(f"The same job with one worker and no fault, {arguments.alone_steps} steps")
    finish(start("stdlib-gpt-alone", arguments.alone_steps, workers=1))

    title("What happened")
    tell(read("stdlib-gpt", "steps.jsonl"), read("stdlib-gpt", "events.jsonl"), killed)
    subprocess.run([BIN / "worldline", "report", "stdlib-gpt"], check=True)
    return subprocess.run([BIN / "worldline", "verify", "stdlib-gpt", "stdlib-gpt-alone"]).returncode


def start(name: str, steps: int, workers: int) -> subprocess.Popen[bytes]:
    settings = {"name": name, "steps": steps, "world.min": 1, "world.max": workers}
    command = [BIN / "worldline", "run", JOB, "--storage", STORAGE, "--resume", "never"]
    return subprocess.Popen([*command, *(f"--set={key}={value}" for key, value in settings.items())])


def kill_a_worker(run: subprocess.Popen[bytes], name: str, step: int) -> float:
    """SIGKILL rank 1 once `step` is completed by a world of several. Returns the Unix time of the kill."""
    began = time.monotonic()
    while True:
        status = read_status(name)
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
        run.kill()
        sys.exit(f"the run did not end within {DEADLINE_S:g} s")
    if code != 0:
        sys.exit(f"the run failed with exit code {code}")


def tell(steps: list[dict[str, Any]], events: list[dict[str, Any]], killed: float) -> None:
    after = next(s for s in steps if s["time"] > killed and s["generation"] > generation_at(steps, killed))
    step_s = statistics.median(s["step_s"] for s in steps if s["generation"] == after["generation"])
    numbers = [s["step"] for s in steps]
    redone = len(numbers) - len(set(numbers))
    per_epoch: dict[int, int] = {}
    for s in steps:
        per_epoch[s["epoch"]] = per_epoch.get(s["epoch"], 0) + s["rows"]
    worlds = [steps[0]["world"]]
    for s in steps:
        if s["world"] != worlds[-1]:
            worlds.append(s["world"])
    lines = {
        "world sizes": " -> ".join(map(str, worlds)),
        "kill to next completed step": f"{after['time'] - killed:.3f} s, of which the step itself {step_s:.3f} s",
        "completed steps redone": str(redone),
        "checkpoints read": str(sum(e["kind"] == "restored" for e in events)),
        "rows trained": ", ".join(f"{rows} in epoch {epoch}" for epoch, rows in per_epoch.items()),
        "loss": f"{steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}",
        "state digest at the end": steps[-1]["state_digest"],
    }
    for name, value in lines.items():
        print(f"  {name:28} {value}")


def generation_at(steps: list[dict[str, Any]], when: float) -> int:
    return max(int(s["generation"]) for s in steps if s["time"] <= when)


def read_status(name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((STORAGE / name / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def read(name: str, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (STORAGE / name / log).read_text().splitlines()]


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
