"""The command line: exit codes, what goes to which stream, start-up without the heavy imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from worldline.cli.main import cli, main

JOB = """
name: a
task: {class: "tasks:T"}
data: {train: {path: data}}
batch: {logical_shards: 8, rows_per_shard: 4}
world: {max: 0, mx: 2}
steps: 10
"""


def worldline(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worldline.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_bad_job_exits_78_with_every_fault(tmp_path: Path, command: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = worldline(command, tmp_path / "job.yaml")
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "bad job: world.max: expected a number greater than 0, found 0",
        "bad job: world.mx: unknown key; did you mean 'world.max'?",
    ]


def test_a_storage_that_cannot_be_used_exits_78_and_says_what_can(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("max: 0, mx: 2", "max: 2"))
    done = worldline("run", tmp_path / "job.yaml", "--storage", "s3://bucket/runs")
    assert done.returncode == 78
    assert "--storage: cannot use s3://bucket/runs" in done.stderr
    assert "give a folder that all nodes see" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["plna"], ["plan"], ["plan", "job.yaml", "--sett", "a=b"]])
def test_wrong_usage_exits_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 64
    assert capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_exits_0(arguments: list[str]) -> None:
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("outcome", "code"), [(None, 0), (75, 75), (KeyboardInterrupt(), 130), (click.ClickException("no"), 1)]
)
def test_an_outcome_becomes_an_exit_code(outcome: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setitem(cli.commands, "probe", click.Command("probe", callback=command))
    assert main(["probe"]) == code


def test_every_command_of_the_contract_is_there() -> None:
    commands = "run status watch resize drain stop verify audit report plan doctor"
    assert cli.commands.keys() == set(commands.split())


@pytest.mark.parametrize("command", ["run", "plan", "doctor"])
@pytest.mark.parametrize(
    "line", ["world: {mx: 2}", "steps: many", "batch: {logical_shards: 6, rows_per_shard: 4}", "epochs: 3"]
)
def test_a_fault_of_the_job_file_needs_nothing_heavy(tmp_path: Path, command: str, line: str) -> None:
    """So it is told at once, not after the seconds that torch and Ray take to import."""
    good = JOB.replace("world: {max: 0, mx: 2}\n", "")
    key = line.partition(":")[0]
    lines = [old for old in good.splitlines() if not old.startswith(f"{key}:")]
    (tmp_path / "job.yaml").write_text("\n".join([*lines, line]))
    code = (
        "import sys; from worldline.cli.main import main; "
        f"code = main([{command!r}, 'job.yaml']); "
        "print(code, [name for name in ('torch', 'ray', 'mlflow', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == ("1 []" if command == "doctor" else "78 []"), done.stderr


def test_start_up_imports_nothing_heavy() -> None:
    heavy = ("torch", "ray", "mlflow", "pyarrow", "numpy", "matplotlib", "boto3")
    code = f"import sys, worldline.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
