"""The jobs that the scenarios run, small enough to take a second of computing, and their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A job and its rows.

    rows: writes the data set into a folder. settings: laid over the job file. file: a shipped job, None for
    that of the tiny task. paced: the task that a scenario can hold, where that is not the job's own.
    """

    name: str
    rows: Callable[[Path], None]
    settings: Settings = field(default_factory=dict)
    file: Path | None = None
    paced: str | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def job_file(self, folder: Path) -> Path:
        if self.file is not None:
            return self.file
        job = {
            "name": "run",
            "task": {"class": "tiny:Tiny"},
            "data": {"train": {"path": "data"}},
            "batch": {"logical_shards": 8, "rows_per_shard": 4},
            "steps": 40,
            "seed": 1234,
        }
        (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
        return folder / "job.yaml"


def numbered(*sizes: int, row_group: int = 100) -> Callable[[Path], None]:
    """Files of so many rows: column id counts through all of them."""

    def write(folder: Path) -> None:
        rng, first = np.random.default_rng(0), 0
        for number, size in enumerate(sizes):
            x = rng.normal(size=(size, 8)).astype(np.float32)
            table = {
                "id": np.arange(first, first + size),
                "x": pa.FixedSizeListArray.from_arrays(x.ravel(), 8),
                "y": x.sum(axis=1) + 1,
            }
            pq.write_table(pa.table(table), folder / f"part-{number:02}.parquet", row_group_size=row_group)
            first += size

    return write


def text(folder: Path) -> None:
    """603 rows of 17 bytes of this repository's own words."""
    from jobs.stdlib_text import chunks

    rows = chunks(ROOT.joinpath("LICENSE").read_bytes(), 17)[:603]
    assert len(rows) == 603
    pq.write_table(pa.table({"text": rows}), folder / "part.parquet", row_group_size=100)


def digits(folder: Path) -> None:
    from jobs.digits_data import write

    write(folder / "digits")


EVERYTHING = Case(
    "everything",
    numbered(200, 99, 200),  # 8 shards of 62 or 63 rows: 8 steps an epoch, the last of 6 or 7 rows a shard
    {
        "batch.accumulate": 2,
        "gradient.clip_norm": 0.5,
        "data.window_rows": 16,
        "data.validation.path": "data",
        "evaluate.every_steps": 14,
    },
)
"""Dropout, BatchNorm, AdamW, a schedule, clipping, accumulation, a short last step an epoch, evaluation."""

FEW_ROWS = Case(
    "31 rows",
    numbered(7, 1, 13, 2, 8),
    {"batch.rows_per_shard": 1, "steps": 12, "task.args": {"norm": False}},  # three epochs
)
MANY_ROWS = Case(
    "100k rows",
    numbered(40_000, 1, 25_007, 34_992, row_group=3_000),
    {"batch.rows_per_shard": 512, "steps": 50},  # two epochs
)

GPT = Case(
    "gpt",
    text,
    {
        "data.train.path": "data/part.parquet",
        "task.args": {"layers": 1, "width": 16, "heads": 2, "context": 16, "warmup": 5, "steps": 40},
        "steps": 40,
    },
    ROOT / "jobs" / "stdlib-gpt.yaml",
    "paced:Gpt",
)
DIGITS = Case(
    "digits",
    digits,
    {
        "data.train.path": "data/digits/train.parquet",
        "data.validation.path": "data/digits/validation.parquet",
        "batch.rows_per_shard": 7,
        "task.args": {"width": 4},
        "epochs": None,
        "steps": 40,
        "evaluate.every_steps": 15,
    },
    ROOT / "jobs" / "digits.yaml",
    "paced:Digits",
)
