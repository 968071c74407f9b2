"""The only code that speaks to MLflow: one run, each point of each curve at most once."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException

from worldline.tracking.embedded import artifact_location, make_database
from worldline.tracking.points import Point

IDENTITY = "mlflow.json"
_KEY_TAG = "worldline.key"


class Tracker:
    """One MLflow run, found again over any number of processes.

    Protocol: `open` before anything else, and again after any call that raised; every call may be repeated.
    `open` finds or creates the run, sets it RUNNING and asks the server for the last step of every curve.
    That, and nothing kept on our side, is the high-water mark: a process killed between sending and noting
    it, a request that timed out but arrived, and a server restored from a backup all come out right.
    `mlflow.json` in the run's folder holds the run's id, and before that the key under which a run created by
    a process that died before it could note the id is found again. Where the run is gone from the server, or
    the server is another, a new one is made and the whole spool goes into it.
    Parameters are written once; one that differs later becomes a tag of its name.
    """

    def __init__(
        self,
        run_dir: Path,
        uri: str,
        experiment: str,
        run_name: str,
        run_id: str | None,
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        self._path = run_dir / IDENTITY
        self._uri = uri
        self._experiment = experiment
        self._run_name = run_name
        self._given_id = run_id
        self._params = params
        self._tags = tags
        self._last: dict[str, int] = {}
        self.run_id: str | None = None

    def open(self) -> None:
        make_database(self._uri, self._path.parent.name, _make_tables)
        self._client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        run = self._find_run()
        self.run_id = run_id = str(run.info.run_id)
        known, tags = run.data.params, dict(self._tags)
        tags |= {key: value for key, value in self._params.items() if key in known and known[key] != value}
        new = [Param(key, value) for key, value in self._params.items() if key not in known]
        for start in range(0, max(len(new), 1), 100):  # MLflow's limit
            self._client.log_batch(run_id, params=new[start : start + 100])
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.update_run(run_id, status="RUNNING")
        self._last = {metric.key: metric.step for metric in run.data.to_proto().metrics}

    def send(self, points: Iterable[Point]) -> int:
        """Send the points that the server does not have; gives their number."""
        assert self.run_id is not None
        new = [point for point in points if point.step > self._last.get(point.key, -1)]
        if new:
            metrics = [Metric(point.key, point.value, point.time_ms, point.step) for point in new]
            self._client.log_batch(self.run_id, metrics=metrics)
            for point in new:
                self._last[point.key] = max(point.step, self._last.get(point.key, -1))
        return len(new)

    def finish(self, status: str, tags: Mapping[str, str]) -> None:
        assert self.run_id is not None
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.set_terminated(self.run_id, status)

    def upload(self, path: Path) -> None:
        assert self.run_id is not None
        self._client.log_artifact(self.run_id, str(path))

    def _find_run(self) -> Any:
        identity = self._read_identity()
        if identity.get("uri") != self._uri:
            identity = {
                "key": identity.get("key", uuid.uuid4().hex),
                "uri": self._uri,
                "run_id": self._given_id,
            }
            self._write_identity(identity)  # before the run is made: the key finds it again
        run = self._live_run(identity["run_id"])
        if run is None:
            experiment_id = self._experiment_id()
            found = self._client.search_runs(
                [experiment_id], f"tags.`{_KEY_TAG}` = '{identity['key']}'", ViewType.ACTIVE_ONLY, 1
            )
            run = found[0] if found else self._create_run(experiment_id, identity["key"])
            self._write_identity(identity | {"run_id": run.info.run_id})
        return run

    def _live_run(self, run_id: str | None) -> Any:
        """The run of this id, or None where the server does not have it or has it deleted."""
        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _create_run(self, experiment_id: str, key: str) -> Any:
        return self._client.create_run(
            experiment_id,
            start_time=round(time.time() * 1000),
            tags={_KEY_TAG: key, **self._tags},
            run_name=self._run_name,
        )

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            location = artifact_location(self._uri)
            try:
                return str(self._client.create_experiment(self._experiment, artifact_location=location))
            except MlflowException:  # another run made it in the meantime
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise RuntimeError(
                f"experiment {self._experiment!r} is deleted; restore it or set another tracking.experiment"
            )
        return str(experiment.experiment_id)

    def _read_identity(self) -> dict[str, Any]:
        try:
            identity: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return identity

    def _write_identity(self, identity: Mapping[str, Any]) -> None:
        temporary = self._path.with_name(f".{IDENTITY}.{os.getpid()}")
        with open(temporary, "w") as file:
            file.write(json.dumps(identity) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


def _make_tables(uri: str) -> None:
    MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
