"""`worldline.train` with what cannot work: said at once, with what to change, and nothing is started."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import worldline
from worldline.control.lease import Lease, LeaseHeld
from worldline.job.faults import JobError
from worldline.storage import StorageError, open_storage

TASK = """
import torch
import worldline

class Net(worldline.Task):
    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return model(batch["x"][:, None]).mean()
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "api_task.py").write_text(TASK)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0, 4.0]}), tmp_path / "data" / "a.parquet")
    yield
    sys.modules.pop("api_task", None)
    assert not ray.is_initialized()


def job(**changes):
    return {
        "name": "run",
        "task": {"class": "api_task:Net"},
        "data": {"train": {"path": "data"}},
        "batch": {"logical_shards": 2, "rows_per_shard": 1},
        "steps": 2,
        "tracking": {"enabled": False},
    } | changes


def faults(**changes):
    with pytest.raises(JobError) as caught:
        worldline.train(job(**changes))
    return str(caught.value)


def test_every_fault_of_the_job_at_once():
    text = faults(stepz=3, world={"min": 3, "max": 2})
    assert "stepz: unknown key; did you mean 'steps'?" in text
    assert "min (3) must not exceed max (2)" in text


def test_a_task_that_is_not_there():
    assert "no_such_module" in faults(task={"class": "no_such_module:Net"})
    assert "Nett" in faults(task={"class": "api_task:Nett"})


def test_a_task_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken_task.py").write_text("import not_installed_anywhere\n")
    assert "not_installed_anywhere" in faults(task={"class": "broken_task:Net"})


def test_data_that_is_not_there():
    assert "data.train" in faults(data={"train": {"path": "nowhere"}})
    assert "data.validation" in faults(
        data={"train": {"path": "data"}, "validation": {"path": "nowhere"}}, evaluate={"every_steps": 1}
    )


def test_a_column_that_is_not_there():
    assert "y" in faults(data={"train": {"path": "data", "columns": ["y"]}})


def test_storage_that_cannot_be_used():
    with pytest.raises(StorageError, match="s3://bucket/runs"):
        worldline.train(job(), storage="s3://bucket/runs")


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_another_driver_has(tmp_path, resume):
    storage = open_storage(str(tmp_path / "runs")).child("run")
    lease = Lease.acquire(storage)
    with pytest.raises(LeaseHeld):
        worldline.train(job(), storage=tmp_path / "runs", resume=resume)
    lease.release()
    assert storage.list("run.json") == []


def test_a_job_that_continues_another_run_lets_the_run_go_again(tmp_path):
    from worldline.control.runs import open_run
    from worldline.job.spec import Job

    storage = open_storage(str(tmp_path / "runs")).child("run")
    open_run(storage, Job.model_validate(job(seed=7)))
    with pytest.raises(JobError, match="seed"):
        worldline.train(job(seed=8), storage=tmp_path / "runs")
    Lease.acquire(storage, sleep=lambda seconds: pytest.fail("still held")).release()
