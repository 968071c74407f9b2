"""A run of the product, driven from outside: job file, command line, signals, files.

A failure scenario reads as it is told:

    run = scenario(EVERYTHING, workers=4).start()
    run.at(step=15).kill(rank=1)
    run.at(step=30).kill(rank=0)
    assert run.finish().line == undisturbed(EVERYTHING)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from tests.cluster.cases import ROOT, Case, Settings
from tests.cluster.command import Command
from tests.cluster.processes import Processes, command_line, kill
from tests.cluster.records import Record, Records

TASKS = Path(__file__).with_name("tasks")
DEADLINE_S = 150.0
"""Until a scenario counts as hung. Nothing that passes comes near it."""
POLL_S = 0.01
NEVER = 10**9
MARK = "WORLDLINE_SCENARIO"
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own: where it is killed, these notice only after a minute."""


class Scenario(Records):
    """One run, through any number of attempts. What holds in every scenario is checked on the way:

    while a worker survives, survivors keep their processes, no completed step is done again and no checkpoint
    is read; the step log has each step once, in order; after an attempt no process of the run is left.

    A task of `tasks/paced.py` computes no step beyond the gate: `at` opens it as far as that and waits until
    all members stand there. The world grows only at a step border, so a held world does not change.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        rows: Path,
        command: Callable[..., Command],
        environment: Mapping[str, str],
        settings: Settings,
    ) -> None:
        self.folder = folder
        self.storage = folder / "runs"
        super().__init__(self.storage / "run")
        folder.mkdir()
        for file in TASKS.glob("*.py"):
            shutil.copy(file, folder)
        (folder / "jobs").symlink_to(ROOT / "jobs")
        (folder / "data").symlink_to(rows)
        self.job = case.job_file(folder)
        self._settings = {"name": "run", "digest_every_steps": 1, "tracking.enabled": False}
        self._settings |= {"failure.hang_s": DEADLINE_S, **case.settings}  # a held run is no hang
        self._settings |= settings
        self._command = command
        self._environment = {**environment, MARK: str(folder)}
        self._driver: Command | None = None
        self._others: list[Command] = []
        self._processes = Processes(f"{MARK}={folder}", folder / "pids")
        self._survivors: set[int] = set()
        self._kept: list[Record] = []
        self._num_restored = 0

    # What a person does

    def start(self, *options: str, whole: bool = True, **settings: Any) -> Self:
        """Run the job, or go on with it, until the workers are held before a step.

        whole: until there are world.max of them. settings: laid over the scenario's; `a__b` is the key a.b.
        """
        self.spawn(*options, **settings)
        self.until(lambda: self._held() is not None, "the first step")
        self.open(self._held_step())
        return self.grow() if whole else self

    def open(self, step: int = NEVER) -> Self:
        """Let the run compute as far as `step`, and wait for nothing."""
        _write(self.folder / "gate", str(step))
        return self

    def spawn(self, *options: str, gate: int = 0, **settings: Any) -> Self:
        """Start the driver and wait for nothing."""
        self.open(gate)
        self._survivors, self._kept = set(), []
        self._driver = self._run(self.folder / "stderr", *options, **settings)
        return self

    def at(self, step: int, within: float = DEADLINE_S) -> Self:
        """Let the run complete `step`, and hold it there."""
        self.open(step)
        self.until(lambda: self._held() == step, f"step {step}", within=within)
        self._check_survivors()
        return self

    def reach(self, step: int) -> Self:
        """Like `at`, by the word of the task alone."""
        members = set(self.members.values())
        self.open(step)

        def there() -> bool:
            notes = self._notes("gate-*")
            return {notes.get(pid) for pid in members} == {str(step + 1)}

        self.until(there, f"step {step}")
        return self

    def more(self, steps: int, within: float = DEADLINE_S) -> Self:
        """Let so many more steps complete."""
        return self.at(self._gate_step() + steps, within)

    def grow(self, to: int = 0) -> Self:
        """Let step after step complete until so many workers train; without a number, world.max."""
        while self.status["world"] < (to or self.workers):
            self.joiners(to)
            self.more(steps=1)
        return self

    def joiners(self, to: int = 0) -> Self:
        """Wait until as many workers stand ready as the world lacks."""
        world = to or self.workers
        self.until(lambda: self.status["world"] + self.status["standbys"] >= world, "joiners")
        return self

    def kill(self, *ranks: int, rank: int | None = None) -> Self:
        """SIGKILL workers, all at the same time."""
        return self.kill_processes(*(self.members[r] for r in (ranks if rank is None else (rank,))))

    def leave(self, num: int) -> Self:
        """SIGKILL all but so many workers, at the same time."""
        return self.kill(*sorted(self.members)[: len(self.members) - num])

    def kill_processes(self, *pids: int) -> Self:
        self.lose(pids)
        kill(pids)
        return self

    def lose(self, pids: Collection[int]) -> None:
        """From now on check that the other members survive."""
        self._survivors = set(self.members.values()) - set(pids)
        self._kept = self.steps if self._survivors else []
        self._num_restored = len(self.events("restored"))

    def kill_driver(self) -> Self:
        """SIGKILL; all others must find out by themselves."""
        self._signal(signal.SIGKILL)
        self.until(lambda: self.ended, "the driver's end", or_ended=True)
        agents = {pid for pid in self._processes.alive() if command_line(pid).startswith(RAY_AGENTS)}
        self._processes.all_gone(within=DEADLINE_S, but=agents)
        kill(agents)
        return self

    def terminate(self) -> Self:
        """SIGTERM to the driver, which stops at a step border, and its end."""
        self._signal(signal.SIGTERM)
        self._let_stop()
        return self.finish(75)

    def finish(self, code: int = 0) -> Self:
        """Let the run go to its end, which must be this exit code."""
        self.open(NEVER)
        self.until(lambda: self.ended, "the end", or_ended=True)
        assert self._driver is not None
        assert self._driver.returncode == code, self._story()
        if self._kept:
            assert self.steps[: len(self._kept)] == self._kept, "completed steps were done again"
        numbers = [step["step"] for step in self.steps]
        assert numbers == list(range(1, len(numbers) + 1))
        self._processes.all_gone(within=DEADLINE_S)
        return self

    def ask(self, *options: str, **settings: Any) -> tuple[int, str]:
        """Start another driver of the run, which must end by itself: its exit code, and what it said."""
        return self._answer(lambda log: self._run(log, *options, **settings))

    def operate(self, command: str, *arguments: str) -> tuple[int, str]:
        """A command from another terminal: its exit code, and what it said."""
        full = [command, "run", *arguments, "--storage", str(self.storage)]
        return self._answer(lambda log: self._command(full, self.folder, self._environment, log))

    def _answer(self, begin: Callable[[Path], Command]) -> tuple[int, str]:
        log = self.folder / "stderr-of-another"
        log.unlink(missing_ok=True)
        process = begin(log)
        self._others.append(process)
        self.until(lambda: process.returncode is not None, "the answer", or_ended=True)
        assert process.returncode is not None
        return process.returncode, log.read_text()

    # Places in the task where it waits

    def hold(self, place: str, *pids: int) -> Self:
        """Whoever comes to this place waits there; if pids are given, only these."""
        _write(self.folder / f"hold-{place}", " ".join(map(str, pids)))
        return self

    def held(self, place: str, num: int = 1) -> list[int]:
        """The processes that wait there, once there are `num`."""
        self.until(lambda: len(self._notes(f"held-{place}-*")) >= num, f"{num} at {place}")
        return sorted(self._notes(f"held-{place}-*"))

    def lead_to(self, place: str) -> list[int]:
        """Let step after step complete until somebody waits at this place: the processes that do."""

        def there() -> bool:
            return bool(self._notes(f"held-{place}-*"))

        while not there():
            self.open(self._gate_step() + 1)
            self.until(lambda: there() or self._held() == self._gate_step(), place)
        return self.held(place)

    def release(self, place: str) -> Self:
        (self.folder / f"hold-{place}").unlink()
        for note in self.folder.glob(f"held-{place}-*"):
            note.unlink()
        return self

    # What is there to see

    @property
    def status(self) -> Record:
        """Of this attempt; empty before it wrote one."""
        try:
            content: Record = json.loads((self.storage / "run" / "status.json").read_text())
        except FileNotFoundError:
            return {}
        self._processes.note(worker["pid"] for worker in content["workers"])
        ours = self._driver is None or content["driver"]["pid"] == self._driver.pid
        return content if ours else {}

    @property
    def ended(self) -> bool:
        return self._driver is None or self._driver.returncode is not None

    @property
    def members(self) -> dict[int, int]:
        """rank -> pid"""
        return {worker["rank"]: worker["pid"] for worker in self.status.get("workers", ())}

    @property
    def said(self) -> str:
        """All that the run's commands wrote to their standard error."""
        try:
            return (self.folder / "stderr").read_text()
        except FileNotFoundError:
            return ""

    @property
    def last_word(self) -> str:
        """Why the run ended, as its status has it and its standard error told."""
        reason: str = self.status["reason"]
        assert reason in self.said
        return reason

    @property
    def seen(self) -> dict[int, Counter[int]]:
        """step -> how often the task computed each row, also in tries that came to nothing."""
        steps: dict[int, Counter[int]] = {}
        for path in self.folder.glob("rows-*"):
            words, place = np.fromfile(path, np.int64).tolist(), 0
            while place < len(words):
                step, num = words[place : place + 2]
                steps.setdefault(step, Counter()).update(words[place + 2 : place + 2 + num])
                place += 2 + num
        return steps

    def until(
        self, condition: Callable[[], bool], what: str, or_ended: bool = False, within: float = DEADLINE_S
    ) -> None:
        deadline = time.monotonic() + within
        while not condition():
            if self.ended and not or_ended:
                raise AssertionError(f"the run ended before {what}\n{self._story()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come within {within:g} s\n{self._story()}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave no process behind, however the scenario went."""
        for driver in (self._driver, *self._others):
            if driver is not None and driver.returncode is None:
                os.kill(driver.pid, signal.SIGKILL)
        kill(self._processes.alive())

    # Inner works

    def _let_stop(self) -> None:
        """It was told to stop: open the gate step by step until it does."""
        self.until(lambda: self.ended or self.status.get("state") == "DRAINING", "the stop", or_ended=True)
        while not self.ended:
            if self._held() is not None:
                self.open(self._gate_step() + 1)
            time.sleep(POLL_S)

    def _run(self, log: Path, *options: str, **settings: Any) -> Command:
        merged = self._settings | {key.replace("__", "."): value for key, value in settings.items()}
        self.workers = merged.get("world.max", 1)
        sets = [f"--set={key}={json.dumps(value)}" for key, value in merged.items()]
        arguments = ["run", str(self.job), "--storage", str(self.storage), *options, *sets]
        return self._command(arguments, self.folder, self._environment, log)

    def _signal(self, number: int) -> None:
        assert self._driver is not None
        os.kill(self._driver.pid, number)

    def _gate_step(self) -> int:
        return int((self.folder / "gate").read_text())

    def _held(self) -> int | None:
        """The completed step at which all members wait; None while they do not."""
        status = self.status
        if status.get("state") != "RUNNING" and status.get("state") != "DRAINING":
            return None
        pids = {worker["pid"] for worker in status["workers"]}
        notes = self._notes("gate-*")
        steps = {notes.get(pid) for pid in pids}
        if len(pids) != status["world"] or len(steps) != 1 or None in steps:
            return None
        step = int(steps.pop()) - 1
        return step if step >= self._gate_step() and status["step"] == step else None

    def _held_step(self) -> int:
        step = self._held()
        assert step is not None
        return step

    def _notes(self, pattern: str) -> dict[int, str]:
        """pid -> content of the notes that processes left."""
        notes = {}
        for path in self.folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                notes[int(path.name.rpartition("-")[2])] = path.read_text()
        return notes

    def _check_survivors(self) -> None:
        if not self._survivors:
            return
        assert self._survivors <= set(self.members.values()), "a survivor changed its process"
        assert self.steps[: len(self._kept)] == self._kept, "completed steps were done again"
        assert len(self.events("restored")) == self._num_restored, (
            "a checkpoint was read in spite of survivors"
        )

    def _story(self) -> str:
        return f"status: {self.status}\n{self.said[-4000:]}"


def _write(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(content)
    temporary.rename(path)
