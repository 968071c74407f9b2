"""status.json: whole at any time, honest about a driver that is gone."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace

from worldline.process import ProcessId
from worldline.tracking.status import STATUS, RunState, Status, StatusWriter, WorkerStatus, read_status

STATUS_NOW = Status(
    run="r", state=RunState.RUNNING, reason="", step=3, steps=10, epoch=0, attempt=1, generation=2, world=1,
    min=1, max=2, workers=(WorkerStatus(0, 0, 11, "n", "10.0.0.1", 3, "step"),), standbys=1, loss=math.nan,
    rows_per_s=10.5, goodput=0.9, incidents=1, mlflow_run_id=None, storage="/runs/r",
)  # fmt: skip


def driver_is(run_dir, **changes):
    path = run_dir / STATUS
    fields = json.loads(path.read_text())
    fields["driver"] |= changes
    path.write_text(json.dumps(fields))


def test_what_is_written_is_read_back(tmp_path):
    assert read_status(tmp_path) is None
    writer = StatusWriter(tmp_path)
    writer.write(STATUS_NOW, now=True)
    back = read_status(tmp_path)
    assert back is not None
    assert back.updated > 0
    assert repr(replace(back, updated=0.0)) == repr(STATUS_NOW)
    writer.write(replace(STATUS_NOW, step=9, state=RunState.FINISHED))
    writer.close()
    assert read_status(tmp_path).step == 9
    assert os.listdir(tmp_path) == [STATUS]


def test_the_writer_writes_by_itself_and_the_newest_last(tmp_path, monkeypatch):
    written = threading.Event()
    rename = os.replace

    def seen(a, b):
        rename(a, b)
        written.set()

    monkeypatch.setattr(os, "replace", seen)
    writer = StatusWriter(tmp_path)
    for step in range(500):
        writer.write(replace(STATUS_NOW, step=step))
    assert written.wait(10)
    writer.close()
    assert read_status(tmp_path).step == 499


def test_a_full_disk_costs_the_status_only(tmp_path, monkeypatch):
    writer = StatusWriter(tmp_path)
    writer.write(STATUS_NOW, now=True)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        writer.write(replace(STATUS_NOW, step=4), now=True)
    assert read_status(tmp_path).step == 3
    writer.close()
    assert read_status(tmp_path).step == 4


def test_a_running_status_whose_driver_is_gone_reads_stopped(tmp_path):
    writer = StatusWriter(tmp_path)
    writer.write(STATUS_NOW, now=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    driver_is(tmp_path, pid=dead.pid)
    status = read_status(tmp_path)
    assert (status.state, status.workers, status.world) == (RunState.STOPPED, (), 0)
    assert status.reason == f"driver process {dead.pid} is gone; run the same command again to resume"


def test_a_reused_pid_is_not_the_driver(tmp_path):
    writer = StatusWriter(tmp_path)
    writer.write(STATUS_NOW, now=True)
    driver_is(tmp_path, start=ProcessId.current().start + 1)
    assert read_status(tmp_path).state is RunState.STOPPED


def test_of_a_driver_elsewhere_only_the_silence_is_told(tmp_path):
    writer = StatusWriter(tmp_path)
    writer.write(STATUS_NOW, now=True)
    driver_is(tmp_path, machine="another", host="far")
    at = read_status(tmp_path).updated
    assert read_status(tmp_path, now=at + 5).reason == ""
    late = read_status(tmp_path, now=at + 300)
    assert (late.state, late.reason) == (RunState.RUNNING, "no word from the driver on far for 300 s")


def test_a_finished_run_needs_no_driver(tmp_path):
    writer = StatusWriter(tmp_path)
    writer.write(replace(STATUS_NOW, state=RunState.FINISHED), now=True)
    driver_is(tmp_path, start=0)
    assert read_status(tmp_path).state is RunState.FINISHED
