"""SIGTERM where no controller takes it: before Ray starts, and while the tracker is waited for."""

import json
import os
import signal
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from worldline.cli.main import main
from worldline.control import launch
from worldline.control.ending import Conclusion
from worldline.job.faults import JobError
from worldline.tracking.status import RunState, read_status

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

JOB = {
    "name": "run",
    "task": {"class": "launch_task:Net"},
    "data": {"train": {"path": "data"}},
    "batch": {"logical_shards": 2, "rows_per_shard": 1},
    "steps": 2,
}


class Tracker:
    """Takes everything at once. wait: what happens meanwhile."""

    run_id = "there"

    def __init__(self, wait=lambda: None):
        self._wait = wait
        self.patience_s = []

    def finish(self, status, patience_s):
        self.patience_s.append(patience_s())
        self._wait()
        self.patience_s.append(patience_s())

    def kill(self):
        pass


@pytest.fixture(autouse=True)
def in_a_folder_with_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "launch_task.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0, 4.0]}), tmp_path / "data" / "a.parquet")
    yield
    sys.modules.pop("launch_task", None)
    assert not ray.is_initialized()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_before_ray_starts_is_written_down(tmp_path, monkeypatch):
    tracker = Tracker()

    def start_tracker(*_):
        terminate()
        return tracker

    monkeypatch.setattr(launch.assemble, "tracker", start_tracker)
    assert main(["run", "job.yaml"]) == 75
    status = read_status(tmp_path / "runs" / "run")
    assert (status.state, status.reason, status.step) == (RunState.STOPPED, "SIGTERM", 0)
    assert len(tracker.patience_s) == 2  # it was told


def test_a_stop_when_all_is_done_changes_nothing(tmp_path, monkeypatch):
    release = launch.Lease.release

    def stop_and_release(lease):
        terminate()
        release(lease)

    monkeypatch.setattr(launch.assemble, "tracker", lambda *_: Tracker())
    monkeypatch.setattr(launch._Attempt, "_drive", lambda *_: Conclusion(RunState.FINISHED, "", 0))
    monkeypatch.setattr(launch.Lease, "release", stop_and_release)
    assert main(["run", "job.yaml"]) == 0
    assert read_status(tmp_path / "runs" / "run").state is RunState.FINISHED


def test_the_callers_ray_is_left_running(monkeypatch):
    def fail(*_):
        raise JobError(["for a test"])

    monkeypatch.setattr(launch.assemble, "tracker", lambda *_: Tracker())
    monkeypatch.setattr(launch, "connect", fail)
    for before, shutdowns in ((True, 0), (False, 1)):
        with monkeypatch.context() as patch:
            answers, ended = iter([before]), []
            patch.setattr(ray, "is_initialized", lambda answers=answers: next(answers, True))
            patch.setattr(ray, "shutdown", lambda ended=ended: ended.append(True))
            assert main(["run", "job.yaml"]) == 78
            assert len(ended) == shutdowns


def test_a_stop_at_the_end_only_hurries_the_tracker(tmp_path, monkeypatch):
    tracker = Tracker(wait=terminate)
    ended = Conclusion(RunState.FINISHED, "", 0)
    monkeypatch.setattr(launch.assemble, "tracker", lambda *_: tracker)
    monkeypatch.setattr(launch._Attempt, "_drive", lambda *_: ended)
    assert main(["run", "job.yaml"]) == 0
    assert read_status(tmp_path / "runs" / "run").state is RunState.FINISHED
    assert tracker.patience_s == [launch.TRACKER_S, launch.HURRY_S]
