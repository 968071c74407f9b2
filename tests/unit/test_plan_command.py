"""`plan` and `doctor`: what they say of a job, and how bad jobs, tasks and data show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from worldline.cli.doctor import doctor
from worldline.cli.plan import Outlook, most_partials, outlook, plan
from worldline.job.load import JobError, load_job

JOB = """
name: small
task: {class: "plan_tasks:Net"}
data: {train: {path: DATA}}
batch: {logical_shards: 8, rows_per_shard: 4}
world: {min: 1, max: 4}
steps: 10
tracking: {enabled: false}
"""

TASKS = """
import torch, worldline

class Net(worldline.Task):
    def build_model(self): return torch.nn.Linear(255, 1)
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(self, model, batch): return model(batch["x"].float()[:, None].expand(-1, 255)).mean()

class Infinite(Net):
    def loss(self, model, batch): return super().loss(model, batch) / 0

class PerRow(Net):
    def loss(self, model, batch): return model(batch["x"].float()[:, None].expand(-1, 255))

class Unused(Net):
    def loss(self, model, batch): return torch.zeros((), requires_grad=True)

class Broken(Net):
    def loss(self, model, batch): return batch["y"]

class Headless(Net):
    def build_model(self):
        return helper()

class Closure(Net):
    def build_optimizer(self, model): return torch.optim.LBFGS(model.parameters())

class Plateau(Net):
    def build_scheduler(self, optimizer): return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

class Sparse(Net):
    def build_optimizer(self, model): return torch.optim.SparseAdam(model.parameters())

def helper():
    return torch.nn.Linear(2, 1)(torch.zeros(3))
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_process: None) -> Path:
    monkeypatch.delitem(sys.modules, "plan_tasks", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan_tasks.py").write_text(TASKS)
    (tmp_path / "plan_broken.py").write_text("1 / 0")
    pq.write_table(pa.table({"x": np.arange(105.0)}), tmp_path / "rows.parquet", row_group_size=10)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("DATA", str(tmp_path / "rows.parquet")))
    return path


def test_plan_tells_steps_shards_and_bytes(job_file: Path) -> None:
    done = CliRunner().invoke(plan, [str(job_file)])
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "small: 10 steps, 2.50 epochs of 4 steps",
        "data    105 rows in 1 file",
        "batch   32 rows a step: 8 logical shards of 4, whatever the world",
        "        9 rows in the last step of an epoch, 1 to 2 a shard "
        "(BatchNorm cannot train on a single row)",
        "model   2 trainable tensors, 1 KiB of gradients",
        "",
        "world  shards a replica  efficiency  sent a step",
        "    1                 8        100%          0 B",
        "    2                 4        100%        1 KiB",
        "    3                 3         89%        2 KiB",
        "    4                 2        100%      1.5 KiB",
    ]


def test_bytes_of_a_native_all_reduce(job_file: Path) -> None:
    job = load_job(job_file, ["mode=same_batches", "world.min=4", "world.max=4"])
    assert list(outlook(job, 1024)) == [Outlook(world=4, shards=2, efficiency=1.0, sent=1536)]


@pytest.mark.parametrize("num_shards", [1, 2, 8, 64])
def test_efficiency_is_the_mean_share_over_the_largest(job_file: Path, num_shards: int) -> None:
    job = load_job(job_file, [f"batch.logical_shards={num_shards}", f"world.max={num_shards}"])
    for world, row in enumerate(outlook(job, 1024), start=1):
        assert row.world == world
        assert row.shards == -(-num_shards // world)
        assert row.efficiency == num_shards / (world * row.shards)
        assert 1 <= most_partials(num_shards, world) <= 2 * num_shards.bit_length()


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("data.train.path=/nowhere/*.parquet", "data.train: no Parquet files match /nowhere/*.parquet"),
        (
            "data.train.transform=plan_tasks:nothing",
            "data.train: module 'plan_tasks' has no function 'nothing'",
        ),
        (
            "data.train.transform=plan_broken:f",
            "data.train: importing 'plan_broken', where transform 'plan_broken:f' is, raised "
            "ZeroDivisionError: division by zero (",
        ),
        ("batch.rows_per_shard=100", "data.train: the data set under"),
        ("task.class=plan_tasks:Nte", "task.class: 'plan_tasks' has no 'Nte'; did you mean 'Net'?"),
    ],
)
def test_plan_refuses_what_cannot_run(job_file: Path, override: str, fault: str) -> None:
    done = CliRunner().invoke(plan, [str(job_file), "--set", override])
    assert isinstance(done.exception, JobError)
    assert done.exception.faults[0].startswith(fault)


def test_plan_says_where_the_model_failed(job_file: Path) -> None:
    done = CliRunner().invoke(plan, [str(job_file), "--set", "task.class=plan_tasks:Headless"])
    assert done.exit_code == 1
    assert "Headless.build_model raised RuntimeError" in done.stderr
    assert "(plan_tasks.py:35, in helper)" in done.stderr


def examine(job_file: Path, *overrides: str) -> Result:
    sets = [part for override in overrides for part in ("--set", override)]
    storage = ["--storage", str(job_file.parent / "runs")]
    return CliRunner().invoke(doctor, [str(job_file), *sets, *storage], standalone_mode=False)


def test_doctor_finds_a_good_job_good(job_file: Path) -> None:
    done = examine(job_file, "world.max=1")
    assert done.return_value == 0, done.output
    levels = {line.split()[1]: line.split()[0] for line in done.stderr.splitlines()}
    assert {
        levels[name] for name in ("python", "torch", "ray", "storage", "job", "task", "data", "loss")
    } == {"ok"}
    assert list((job_file.parent / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("override", "fail"),
    [
        ("world.mx=2", "job .*world.mx: unknown key; did you mean 'world.max'"),
        ("task.class=plan_tasks:Infinite", "loss .*is not finite -> look at the first batch"),
        ("task.class=plan_tasks:PerRow", r"loss .*Tensor \[4, 1\] -> return a scalar"),
        ("task.class=plan_tasks:Unused", "loss .*no parameter has a gradient -> loss"),
        ("task.class=plan_tasks:Broken", r"first step .*KeyError: 'y' \(plan_tasks.py:19, in loss\)$"),
        (
            "task.class=plan_tasks:Headless",
            r"task .*Headless.build_model raised RuntimeError: .*\(plan_tasks.py:35, in helper\)$",
        ),
        ("task.class=plan_tasks:Closure", "task .*LBFGS.step needs closure, .*Use .* such as AdamW or SGD"),
        ("task.class=plan_tasks:Plateau", "task .*ReduceLROnPlateau.step needs metrics, .*Use a scheduler"),
        ("task.class=plan_tasks:Sparse", "first step .*SparseAdam does not support dense gradients"),
        ("data.train.path=nowhere", "first step .*data.train: no file or folder at .*nowhere"),
        ("world.gpus_per_worker=1000", "gpus .*of 4000 needed -> lower world.max"),
    ],
)
def test_doctor_fails_with_what_is_wrong(job_file: Path, override: str, fail: str) -> None:
    done = examine(job_file, override)
    assert done.return_value == 1
    assert re.search(f"^fail  {fail}", done.stderr, re.MULTILINE), done.stderr


def test_doctor_warns_of_what_only_slows_or_hides(job_file: Path) -> None:
    done = examine(job_file, "world.cpus_per_worker=1000", "tracking={uri: 'http://127.0.0.1:9'}")
    assert done.return_value == 0, done.output
    assert re.search("^warn  cores .*share cores", done.stderr, re.MULTILINE)
    assert re.search("^warn  tracking .*keep its points", done.stderr, re.MULTILINE)


def test_doctor_says_where_it_cannot_write(job_file: Path) -> None:
    (job_file.parent / "file").write_text("")
    done = CliRunner().invoke(doctor, ["--storage", str(job_file.parent / "file")], standalone_mode=False)
    assert done.return_value == 1
    assert re.search("^fail  storage .*file.* -> choose another", done.stderr, re.MULTILINE), done.stderr
