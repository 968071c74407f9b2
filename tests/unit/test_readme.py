"""The README's own model runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from worldline.cli.doctor import doctor
from worldline.cli.plan import plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_process: None) -> list[str]:
    """Every code block that begins with its file's name, written to that file; the names."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```\w+\n# (\S+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    for name, text in blocks:
        Path(name).write_text(text)
    rows = np.random.default_rng(0).random((3, 500), dtype=np.float32)
    pq.write_table(pa.table(dict(zip("xyz", rows, strict=True))), "rows.parquet")
    return [name for name, _ in blocks]


def test_the_readmes_model_runs(example: list[str]) -> None:
    assert example == ["surface.py", "surface.yaml"]
    done = CliRunner().invoke(doctor, ["surface.yaml"], standalone_mode=False)
    assert done.return_value == 0, done.output
    done = CliRunner().invoke(plan, ["surface.yaml", "--set", "world.max=8"])
    assert done.exit_code == 0, done.output
    assert len(Path("surface.py").read_text().splitlines()) <= 20
