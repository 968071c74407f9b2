"""Delivery to a real MLflow: one run, each point once, whoever dies."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from mlflow import MlflowClient

from worldline.events import EvaluationRecord, Event, EventKind, StepRecord
from worldline.tracking.embedded import embedded_uri
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, EvaluationLog, EventLog, StepLog
from worldline.tracking.mlflow import MlflowDelivery
from worldline.tracking.points import Points
from worldline.tracking.tracker import IDENTITY, Tracker

LIMIT_S = 120
RECORD = StepRecord(
    step=0, epoch=0, loss=0.5, lr=0.1, grad_norm=0.3, rows=32, world=2, generation=1, attempt=1, step_s=0.05,
    data_s=0.001, compute_s=0.04, reduce_s=0.005, state_digest=None, rows_digest="ab", time=1.7e9,
)  # fmt: skip


def records(start, stop, **changes):
    """Each attempt at its own time: a step done again is another point, which the server would keep too."""
    began = 1.7e9 + 1000 * changes.get("attempt", 1)
    return [replace(RECORD, step=k, time=began + k, **changes) for k in range(start, stop)]


def until(condition, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """Making the tables takes seconds: once."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path.read_bytes()


@pytest.fixture
def run_dir(tmp_path, empty_database):
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    (tmp_path / "r").mkdir()
    return tmp_path / "r"


class Database:
    def __init__(self, path):
        self._path = path

    def rows(self, query):
        connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def steps(self, key):
        return [step for (step,) in self.rows(f"select step from metrics where key = '{key}' order by step")]

    def doubled(self):
        return self.rows("select key, step from metrics group by run_uuid, key, step having count(*) > 1")

    def runs(self):
        return self.rows("select name, status from runs")

    def tags(self):
        return dict(self.rows("select key, value from tags"))

    def params(self):
        return dict(self.rows("select key, value from params"))


@pytest.fixture
def database(run_dir):
    return Database(run_dir.parent / "mlflow.db")


def start(run_dir, uri=None, **values):
    uri = embedded_uri(run_dir.parent) if uri is None else uri
    return MlflowDelivery.start(run_dir, uri, "worldline", "r", **values)


def tracker(run_dir, params=None, tags=None, run_id=None):
    return Tracker(run_dir, embedded_uri(run_dir.parent), "worldline", "r", run_id, params or {}, tags or {})


def test_one_run_with_all_its_curves(run_dir, database):
    log = StepLog(run_dir / STEPS)
    log.append(records(1, 5) + records(5, 6, loss=float("nan")) + records(6, 7, loss=float("inf")))
    EvaluationLog(run_dir / EVALUATIONS).append(EvaluationRecord(6, 10, {"accuracy": 0.5}, 0.1, 1, 1))
    EventLog(run_dir / EVENTS).append([Event(1.7e9, EventKind.WORKER_LOST, 1, 2, 2, 1)])
    delivery = start(run_dir, params={"seed": 7}, tags={"attempt": 1})
    log.append(records(7, 151))
    (run_dir / "report.html").write_text("<html></html>")
    assert delivery.finish("FINISHED", lambda: LIMIT_S) is None
    assert delivery.run_id is not None
    assert database.runs() == [("r", "FINISHED")]
    assert database.steps("lr") == list(range(1, 151))
    assert database.steps("loss") == [1, 2, 3, 4, *range(7, 151)]
    assert database.rows("select step, value from metrics where key = 'nonfinite_steps'") == [(5, 1), (6, 2)]
    assert database.rows("select step, value from metrics where key = 'val_accuracy'") == [(6, 0.5)]
    assert database.steps("incidents") == [3]
    assert database.doubled() == []
    assert database.params() == {"seed": "7"}
    assert database.tags()["attempt"] == "1"
    assert list((run_dir.parent / "mlartifacts").rglob("report.html"))


def test_the_delivery_process_is_killed_and_each_point_is_there_once(run_dir, database):
    log = StepLog(run_dir / STEPS)
    log.append(records(1, 201))
    delivery = start(run_dir)
    until(lambda: database.steps("loss"), "first points")
    killed = delivery.pid
    os.kill(killed, signal.SIGKILL)
    log.append(records(201, 401))
    until(lambda: delivery.pid != killed, "a second process")
    log.append(records(401, 501))
    assert delivery.finish("FINISHED", lambda: LIMIT_S) is None
    assert database.steps("loss") == list(range(1, 501))
    assert database.doubled() == []
    assert database.runs() == [("r", "FINISHED")]


def test_the_driver_is_killed_and_the_next_attempt_goes_on_in_the_same_run(run_dir, database):
    log = StepLog(run_dir / STEPS)
    log.append(records(1, 51))
    driver = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys, time; from pathlib import Path\n"
            "from worldline.tracking.embedded import *\n"
            "from worldline.tracking.mlflow import *\n"
            "d = Path(sys.argv[1])\n"
            "m = MlflowDelivery.start(d, embedded_uri(d.parent), 'worldline', 'r', None,"
            "  {'seed': 7, 'steps': 100}, {'world_max': 3, 'attempt': 1})\n"
            "while not m.pid: time.sleep(0.01)\n"
            "print(m.pid, flush=True); time.sleep(300)",
            str(run_dir),
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    child = int(driver.stdout.readline())
    until(lambda: database.steps("loss")[-1:] == [50], "the first attempt's points")
    driver.kill()
    driver.wait()
    until(lambda: not os.path.exists(f"/proc/{child}"), "the delivery process to follow its driver")
    assert database.runs() == [("r", "RUNNING")]

    log.truncate(after_step=20)  # the newest checkpoint
    log.append(records(21, 101, attempt=2, world=1))
    second = start(run_dir, params={"seed": 7, "steps": 200}, tags={"world_max": 2, "attempt": 2})
    assert second.finish("FINISHED", lambda: LIMIT_S) is None
    assert database.runs() == [("r", "FINISHED")]
    assert database.steps("loss") == list(range(1, 101))
    assert database.doubled() == []
    assert database.params() == {"seed": "7", "steps": "100"}
    tags = database.tags()
    assert (tags["world_max"], tags["attempt"], tags["steps"]) == ("2", "2", "200")


def test_a_dead_server_costs_the_run_nothing_and_is_named_at_the_end(run_dir):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        log = StepLog(run_dir / STEPS)
        log.append(records(1, 38))
        delivery = start(run_dir, uri)
        until(lambda: delivery._report.get("error"), "the first failure")
        text = delivery.finish("FINISHED", lambda: 1.0)
    assert text.startswith(f"tracker: 37 of 37 steps not delivered to {uri}: ")
    assert "refused" in text
    assert text.endswith("; they stay in steps.jsonl; the next attempt sends them")


def test_a_silent_server_costs_no_more_than_the_time_allowed(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        delivery = start(run_dir, f"http://127.0.0.1:{silent.getsockname()[1]}")
        StepLog(run_dir / STEPS).append(records(1, 3))
        until(lambda: delivery.pid, "the process")
        pid = delivery.pid
        assert delivery.finish("FAILED", lambda: 0.5).startswith("tracker: 2 of 2 steps not delivered")
    assert not os.path.exists(f"/proc/{pid}")


def test_a_wait_for_the_tracker_can_be_cut_short(run_dir):
    patience = iter([600.0] * 3)  # then it is over
    with socket.create_server(("127.0.0.1", 0)) as silent:
        delivery = start(run_dir, f"http://127.0.0.1:{silent.getsockname()[1]}")
        StepLog(run_dir / STEPS).append(records(1, 3))
        assert "2 of 2 steps not delivered" in delivery.finish("FINISHED", lambda: next(patience, 0.0))
    assert next(patience, None) is None


def test_a_server_over_http(run_dir, database, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    log = StepLog(run_dir / STEPS)
    log.append(records(1, 101))
    delivery = start(run_dir, uri)  # before the server is up
    until(lambda: delivery._report.get("error"), "the first failure")
    server = subprocess.Popen(
        [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
            "--workers", "1", "--backend-store-uri", embedded_uri(run_dir.parent),
            "--artifacts-destination", str(tmp_path / "a"),
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: healthy(uri), "the server")
        until(lambda: database.steps("loss"), "first points")
        os.kill(delivery.pid, signal.SIGKILL)
        log.append(records(101, 201))
        (run_dir / "report.png").write_bytes(b"png")
        assert delivery.finish("FAILED", lambda: LIMIT_S) is None
        assert database.runs() == [("r", "FAILED")]
        assert database.steps("loss") == list(range(1, 201))
        assert database.doubled() == []
        assert list((tmp_path / "a").rglob("report.png"))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy(uri):
    try:
        return urllib.request.urlopen(f"{uri}/health", timeout=5).status == 200
    except OSError:
        return False


def test_a_batch_that_arrived_though_the_answer_was_lost_is_not_sent_again(run_dir, database):
    line = records(1, 2)[0].__dict__
    first = tracker(run_dir)
    first.open()
    send = first._client.log_batch

    def lose_the_answer(*args, **kwargs):
        send(*args, **kwargs)
        raise ConnectionError("timed out")

    first._client.log_batch = lose_the_answer
    points = Points().step(line)
    with pytest.raises(ConnectionError):
        first.send(points)
    first.open()
    assert first.send(points) == 0
    assert first.send(Points().step(line | {"step": 2})) == len(points)
    assert database.doubled() == []


def test_a_run_made_by_a_process_that_died_before_noting_its_id_is_found_again(
    run_dir, database, monkeypatch
):
    first = tracker(run_dir)
    write, written = first._write_identity, []

    def die_at_the_second(identity):
        written.append(identity)
        if len(written) == 2:
            raise SystemExit
        write(identity)

    monkeypatch.setattr(first, "_write_identity", die_at_the_second)
    with pytest.raises(SystemExit):
        first.open()
    assert len(database.runs()) == 1
    second = tracker(run_dir)
    second.open()
    assert second.run_id == written[1]["run_id"]
    assert len(database.runs()) == 1


def test_a_run_deleted_on_the_server_is_made_anew_with_all_its_points(run_dir, database):
    points = Points().step(records(1, 2)[0].__dict__)
    first = tracker(run_dir)
    first.open()
    assert first.send(points) > 0
    MlflowClient(tracking_uri=embedded_uri(run_dir.parent)).delete_run(first.run_id)
    second = tracker(run_dir)
    second.open()
    assert second.run_id != first.run_id
    assert second.send(points) == len(points)


def test_a_database_that_was_cut_short_while_it_grew_is_made_anew(run_dir, database):
    """The delivery process is killed while MLflow makes the tables, which it cannot resume."""
    (run_dir.parent / "mlflow.db").unlink()
    growing = run_dir.parent / ".mlflow.db.r"
    StepLog(run_dir / STEPS).append(records(1, 11))
    first = start(run_dir)

    def grown():
        try:
            return len(Database(growing).rows("select name from sqlite_master")) > 12
        except sqlite3.OperationalError:  # not there yet, or locked
            return False

    until(grown, "the tables")
    first.kill()
    assert not (run_dir.parent / "mlflow.db").exists()
    assert start(run_dir).finish("FINISHED", lambda: LIMIT_S) is None
    assert database.steps("loss") == list(range(1, 11))
    assert sorted(path.name for path in run_dir.parent.glob("*mlflow.db*")) == ["mlflow.db"]
    assert not growing.exists()


def test_a_known_run_id_is_used(run_dir, database):
    first = tracker(run_dir)
    first.open()
    (run_dir / IDENTITY).unlink()
    second = tracker(run_dir, run_id=first.run_id)
    second.open()
    assert second.run_id == first.run_id
    assert len(database.runs()) == 1
