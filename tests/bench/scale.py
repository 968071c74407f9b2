"""What a change of the world costs the controller, by the number of workers.

The real controller, membership and planner are driven over simulated workers, which cost nothing and answer
at once. For each size: the controller's own time and the messages to and from workers, for forming the first
generation, for a loss until the next generation is formed, for a join and for a drained worker's leave, both
beyond what the same time costs when nothing happens, and for a second in which nothing happens.

    python tests/bench/scale.py [--workers 100 1000 10000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unit.fake_cluster import STEP_S, Attempt

from worldline.control.signals import DrainRequested
from worldline.events import EventKind

LAST_STEP = 60
MESSAGES = ("request", "train", "meet", "halt", "abandon", "fetch", "inquire", "write_checkpoint", "dismiss")


@dataclass
class Cost:
    """What the controller had spent at a moment. simulated_s: the time that had passed for the workers."""

    seconds: float
    orders: int
    signals: int
    simulated_s: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds - other.seconds,
            self.orders - other.orders,
            self.signals - other.signals,
            self.simulated_s - other.simulated_s,
        )

    def times(self, share: float) -> Cost:
        return Cost(
            self.seconds * share,
            round(self.orders * share),
            round(self.signals * share),
            self.simulated_s * share,
        )


class Metered(Attempt):
    """An attempt that knows what its controller has spent: all time but that of the simulation."""

    def __init__(self, folder: Path, workers: int) -> None:
        shards = 1 << (workers - 1).bit_length()
        super().__init__(
            folder,
            last_step=LAST_STEP,
            max=workers,
            num_shards=max(shards, 2),
            start_s=10_000.0,
        )
        self._simulating_s = 0.0
        self._began = time.thread_time()
        self._num_orders = 0
        self._num_signals = 0
        for name in MESSAGES:
            setattr(self.cluster, name, self._counted(getattr(self.cluster, name)))
        self.signals.next = self._received(self.signals.next)
        self.marks: dict[str, Cost] = {}

    @property
    def spent(self) -> Cost:
        seconds = time.thread_time() - self._began - self._simulating_s
        return Cost(seconds, self._num_orders, self._num_signals, self.now)

    def mark(self, name: str) -> None:
        self.marks[name] = self.spent

    def at(self, name: str, happens: Callable[[], None]) -> None:
        self.mark(name)
        happens()

    def pass_time(self, seconds: float) -> None:
        self._simulate(lambda: super(Metered, self).pass_time(seconds))

    def _simulate(self, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return call()
        finally:
            self._simulating_s += time.thread_time() - began

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._num_orders += 1
            return self._simulate(lambda: call(*arguments))

        return counted

    def _received(self, call: Callable[[float], Any]) -> Callable[[float], Any]:
        def received(timeout_s: float) -> Any:
            signal = call(timeout_s)
            self._num_signals += signal is not None
            return signal

        return received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10_000])
    sizes = parser.parse_args().workers
    print(f"{'':24}" + "".join(f"{size:>10,} workers, messages" for size in sizes))
    results = [measure(size) for size in sizes]
    for name in results[0]:
        cells = [f"{r[name].seconds:16.3f} s{r[name].orders + r[name].signals:10,}" for r in results]
        print(f"{name:24}" + "".join(cells))


def drained(answer: Any) -> DrainRequested:
    return DrainRequested("0", 5.0, "the benchmark", answer)


def measure(workers: int) -> dict[str, Cost]:
    with tempfile.TemporaryDirectory(prefix="wl-") as folder:
        run = Metered(Path(folder), workers)
        run.mark("begin")
        script = run.cluster.script
        script[1] = lambda: run.mark("formed")
        script[10] = lambda: run.mark("quiet")
        script[20] = lambda: run.mark("still quiet")
        script[21] = lambda: run.at("before loss", lambda: run.cluster.die(f"w{workers // 2}"))
        script[22] = lambda: run.mark("after loss")
        script[40] = lambda: run.at("before drain", lambda: run.ask(drained))
        conclusion = run.run()
        assert conclusion.exit_code == 0, conclusion
        assert run.told == list(range(1, LAST_STEP + 1))
        formed = [e for e in run.events if e.kind is EventKind.GENERATION_FORMED]
        assert [e.world_after for e in formed[:2]] == [workers, workers - 1]
        marks = run.marks
        quiet = marks["still quiet"] - marks["quiet"]
        second = quiet.times(1.0 / max(quiet.simulated_s, STEP_S))

        def beyond_quiet(cost: Cost) -> Cost:
            return cost - second.times(cost.simulated_s)

        return {
            "the first generation": marks["formed"] - marks["begin"],
            "a loss": marks["after loss"] - marks["before loss"],
            "a join": beyond_quiet(marks["before drain"] - marks["after loss"]),
            "a drain and its join": beyond_quiet(run.spent - marks["before drain"]),
            "a second without changes": second,
        }


if __name__ == "__main__":
    main()
