"""What a run leaves in its folder for everybody to read."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]

NUMBERS = frozenset(
    ("step", "epoch", "loss", "lr", "grad_norm", "rows", "rows_digest", "state_digest", "skipped", "metrics")
)


class Tracked(NamedTuple):
    """An MLflow run. points: (metric, step, value), as they lie there."""

    id: str
    name: str
    status: str
    points: list[tuple[str, int, float]]
    tags: dict[str, str]


class Records:
    """The folder of one run. Everything is read anew each time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def steps(self) -> list[Record]:
        return self.read("steps.jsonl")

    @property
    def evaluations(self) -> list[Record]:
        return self.read("evaluations.jsonl")

    @property
    def line(self) -> list[Record]:
        """What must not depend on the run's history: of every step and evaluation, all but who and when."""
        logs = self.steps + self.evaluations
        return [{key: value for key, value in record.items() if key in NUMBERS} for record in logs]

    @property
    def worlds(self) -> set[int]:
        return {step["world"] for step in self.steps}

    def events(self, kind: str) -> list[Record]:
        return [event for event in self.read("events.jsonl") if event["kind"] == kind]

    @property
    def checkpoints(self) -> list[int]:
        """Steps of those that are committed."""
        found = (self._folder / "checkpoints").glob("step-*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def manifest(self, step: int) -> Record:
        """That of a committed checkpoint."""
        path = self._folder / "checkpoints" / f"step-{step:08}" / "manifest.json"
        content: Record = json.loads(path.read_text())
        return content

    def parts(self, step: int) -> list[Path]:
        """The tensor files of a checkpoint, be it committed or not."""
        return sorted((self._folder / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))

    @property
    def tracked(self) -> Tracked:
        """The one MLflow run that there must be."""
        with sqlite3.connect(self._folder.parent / "mlflow.db") as database:
            [(id, name, status)] = database.execute("select run_uuid, name, status from runs")
            points = database.execute("select key, step, value from metrics where run_uuid = ?", [id])
            tags = database.execute("select key, value from tags where run_uuid = ?", [id])
            return Tracked(id, name, status, points.fetchall(), dict(tags))

    def read(self, name: str) -> list[Record]:
        """The whole lines of a log."""
        try:
            text = (self._folder / name).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
