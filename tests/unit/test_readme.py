"""What the README says holds: its model runs as printed, its paths, settings and commands are there."""

from __future__ import annotations

import re
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from worldline.cli.doctor import doctor
from worldline.cli.main import cli
from worldline.cli.plan import plan
from worldline.job.spec import DatasetSpec, Job

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_process: None) -> list[str]:
    """Every code block that begins with its file's name, written to that file; the names."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    for name, text in blocks:
        Path(name).write_text(text)
    return [name for name, _ in blocks]


def test_the_readmes_model_runs(example: list[str]) -> None:
    assert example == ["surface.py", "surface.yaml", "rows.py"]
    runpy.run_path("rows.py")
    done = CliRunner().invoke(doctor, ["surface.yaml"], standalone_mode=False)
    assert done.return_value == 0, done.output
    done = CliRunner().invoke(plan, ["surface.yaml", "--set", "world.max=4"])
    assert done.exit_code == 0, done.output
    assert len(Path("surface.py").read_text().splitlines()) <= 20


def test_paths_are_there() -> None:
    paths = set(re.findall(r"\b(?:platform|jobs|tests)/[\w./-]*\w", README))
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_commands_are_there() -> None:
    said = set(re.findall(r"\bworldline (\w+) (?:surface|stdlib)", README))
    assert said >= {"run", "doctor", "plan", "status", "audit", "report", "verify"}
    assert said <= set(cli.commands)


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if is_section(kind)]
        key = prefix + (field.alias or name)
        if inner == [DatasetSpec] and field.default is None:
            yield key  # the same again
        elif inner:
            yield from settings(inner[0], f"{key}.")
        else:
            yield key


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_the_table_of_settings_is_whole() -> None:
    table = README[README.index("## Settings") : README.index("## When the world changes")]
    cells = re.findall(r"^\| ([^|]*`[^|]*)\|", table, re.MULTILINE)
    assert sorted(re.findall(r"`([a-z_.]+)`", "".join(cells))) == sorted(settings(Job))


def test_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)\b(?=`|  )", README))
    assert targets >= {"demo", "test", "ui"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
