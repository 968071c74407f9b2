"""status, watch, verify, report: what they print where, and how they exit."""

import json
import subprocess
import sys
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from worldline.cli.inspect import COMMANDS
from worldline.data.audit import planned_digest
from worldline.data.manifest import FileEntry, Manifest
from worldline.events import Event, EventKind, StepRecord
from worldline.job.spec import Job
from worldline.tracking.log import EVENTS, STEPS, EventLog, StepLog
from worldline.tracking.status import DRAINING, RunState, Status, StatusWriter, WorkerStatus
from worldline.worker.plans import training_plan

RECORD = StepRecord(
    step=0, epoch=0, loss=0.5, lr=0.1, grad_norm=0.3, rows=10, world=2, generation=1, attempt=1, step_s=0.5,
    data_s=0.05, compute_s=0.3, reduce_s=0.1, state_digest=None, rows_digest="ab", time=100.0,
)  # fmt: skip
STATUS = Status(
    run="a", state=RunState.RUNNING, reason="", step=3, steps=10, epoch=0, attempt=1, generation=2, world=1,
    min=1, max=2, workers=(WorkerStatus(0, 0, 11, "n", "10.0.0.1", 3, "step"),), standbys=1, loss=0.5,
    rows_per_s=10.5, goodput=0.9, incidents=1, mlflow_run_id="abc", storage="/runs/a",
)  # fmt: skip


@pytest.fixture
def storage(tmp_path):
    for name, num, loss in (("a", 10, 0.5), ("b", 6, 0.5), ("c", 10, 0.25)):
        (tmp_path / name).mkdir()
        log = StepLog(tmp_path / name / STEPS)
        log.append([replace(RECORD, step=k, loss=loss if k > 4 else 0.5) for k in range(1, num + 1)])
    (tmp_path / "not-a-run").mkdir()
    return tmp_path


def run(*args):
    group = click.Group(commands={command.name: command for command in COMMANDS})
    return CliRunner().invoke(group, [str(arg) for arg in args])


def test_status_json_has_exactly_the_contract_s_fields(storage):
    writer = StatusWriter(storage / "a")
    writer.write(STATUS, now=True)
    result = run("status", "a", "--storage", storage, "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert " ".join(fields) == (
        "run state reason step steps epoch attempt generation world min max workers standbys loss rows_per_s "
        "goodput incidents mlflow_run_id storage updated"
    )
    assert " ".join(fields["workers"][0]) == "rank replica pid node ip step phase"
    assert result.stderr == ""


def test_status_for_people_goes_to_standard_error(storage):
    writer = StatusWriter(storage / "a")
    writer.write(STATUS, now=True)
    result = run("status", storage / "a")
    assert result.exit_code == 0
    assert result.stdout == ""
    for part in ("RUNNING", "3 of 10", "1 (1 to 2), 1 standing by\n", "rank 0  pid 11", "abc"):
        assert part in result.stderr


def test_status_shows_who_leaves_why_it_waits_and_no_long_ids(storage):
    node = "0123456789abcdef" * 3
    leaving = WorkerStatus(1, 1, 12, node, "10.0.0.2", 3, DRAINING)
    writer = StatusWriter(storage / "a")
    waits = replace(
        STATUS, state=RunState.WAITING, reason="1 of at least 2", workers=(*STATUS.workers, leaving)
    )
    writer.write(waits, now=True)
    shown = run("status", "a", "--storage", storage).stderr
    for part in (
        "WAITING: 1 of at least 2",
        "1 standing by, 1 leaving",
        "node 01234567 10.0.0.2",
        "draining",
    ):
        assert part in shown
    assert node not in shown
    assert node in run("status", "a", "--storage", storage, "--json").stdout


def test_a_run_without_a_status_yet_is_to_be_tried_again(storage):
    result = run("status", "a", "--storage", storage)
    assert (result.exit_code, result.stdout) == (75, "")
    assert "no status yet" in result.stderr


def test_verify_equal(storage):
    result = run("verify", "a", "b", "--storage", storage)
    assert result.exit_code == 0
    assert result.stderr == (
        "equal, bit by bit: 6 common steps, 0 with digests of the whole state (a has 10 steps, b has 6)\n"
    )


def test_verify_different(storage):
    result = run("verify", "a", "c", "--storage", storage)
    assert result.exit_code == 1
    assert "different: step 5: loss is 0.5 and 0.25" in result.stderr


def test_verify_with_nothing_in_common(storage):
    (storage / "d").mkdir()
    StepLog(storage / "d" / STEPS)
    result = run("verify", "a", storage / "d", "--storage", storage)
    assert result.exit_code == 1
    assert "nothing to compare" in result.stderr


@pytest.mark.parametrize("command", [["status"], ["watch"], ["verify", "a"], ["report"]])
def test_an_unknown_run_is_wrong_usage_and_the_known_are_named(storage, command):
    result = run(*command, "nope", "--storage", storage)
    assert result.exit_code == 64
    assert "no run 'nope'" in result.stderr
    assert "it holds a, b, c;" in result.stderr
    assert result.stdout == ""


def test_an_empty_storage_says_so(tmp_path):
    result = run("status", "x", "--storage", tmp_path / "none")
    assert result.exit_code == 64
    assert "it holds no run" in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.fixture
def audited(storage):
    """Run "a" as if it had trained the plan of a small data set, two epochs of 5 steps."""
    job = Job.model_validate(
        {"name": "a", "task": {"class": "t:T"}, "data": {"train": {"path": "x"}}, "steps": 10, "seed": 3,
         "batch": {"logical_shards": 2, "rows_per_shard": 4}}
    )  # fmt: skip
    manifest = Manifest((FileEntry("x.parquet", 1, (30, 10), "d"),), (("x", "float"),), "/data")
    plan = training_plan(job, manifest, "")
    folder = storage / "a"
    (folder / "data").mkdir()
    (folder / "data" / "manifest.json").write_text(manifest.to_json())
    (folder / "run.json").write_text(json.dumps({"job": job.model_dump(mode="json", by_alias=True)}))
    (folder / STEPS).unlink()
    digests = [planned_digest(plan, step) for step in range(1, 11)]
    StepLog(folder / STEPS).append(
        [replace(RECORD, step=k, rows=8, rows_digest=digest) for k, digest in enumerate(digests, 1)]
    )
    return storage


def test_audit_of_an_honest_run(audited):
    result = run("audit", "a", "--storage", audited)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.splitlines() == [
        "every row once: a trained 80 rows in 10 steps, each step the rows that the plan demands",
        "  epoch 0  40 of 40 rows, each exactly once",
        "  epoch 1  40 of 40 rows, each exactly once",
    ]
    result = run("audit", "a", "--storage", audited, "--json")
    said = json.loads(result.stdout)
    assert result.stderr == ""
    assert (said["every_row_once"], said["rows"], said["faults"]) == (True, 80, [])
    assert said["epochs"][1] == {"epoch": 1, "steps": 5, "rows": 40, "complete": True, "of_rows": 40}


def test_audit_of_a_run_with_other_rows(audited):
    log = audited / "a" / STEPS
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:4] + lines[5:]) + "\n")
    result = run("audit", "a", "--storage", audited)
    assert result.exit_code == 1
    assert result.stderr == "not proven: step 5 is missing in the log\n"
    assert run("audit", "a", "--storage", audited, "--json").exit_code == 1


def test_audit_without_a_plan_is_wrong_usage(storage):
    result = run("audit", "a", "--storage", storage)
    assert result.exit_code == 64
    assert "run.json" in result.stderr


def test_report_writes_the_page(storage):
    result = run("report", "a", "--storage", storage)
    assert result.exit_code == 0
    assert (storage / "a" / "report.html").exists()


def test_watch_ends_with_the_run(storage):
    writer = StatusWriter(storage / "a")
    writer.write(replace(STATUS, state=RunState.FINISHED), now=True)
    EventLog(storage / "a" / EVENTS).append([Event(1.0, EventKind.FINISHED, 1, 10, 1, 1)])
    result = run("watch", "a", "--storage", storage)
    assert result.exit_code == 0
    assert "finished   at step 3 of 10" in result.stderr
    assert "rows       100" in result.stderr


def test_looking_at_a_run_imports_nothing_heavy():
    code = (
        "import sys, worldline.cli.inspect; heavy = 'torch ray mlflow matplotlib rich numpy pydantic'; "
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
