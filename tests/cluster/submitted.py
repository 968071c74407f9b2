"""A run as a job that was submitted to a Ray cluster."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ray.job_submission import JobStatus, JobSubmissionClient
from tests.cluster.command import SCRIPT
from tests.cluster.nodes import Nodes
from tests.cluster.scenario import DEADLINE_S, MARK, Scenario

PID_S = 60.0
POLL_S = 0.05


class Submitted:
    """A `Command` that Ray runs beside its head. Ray takes no submission id twice, so each has its own."""

    def __init__(
        self,
        client: JobSubmissionClient,
        runtime_env: Mapping[str, Any],
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._client = client
        number = sum(1 for _ in folder.glob("driver-*")) + 1
        note = folder / f"driver-{number}"
        note.touch()
        command = shlex.join([str(SCRIPT), *arguments])
        self.id: str = client.submit_job(
            entrypoint=f"cd {folder}; echo $$ > {note}; exec {command} 2>> {log}",
            submission_id=f"{folder.parent.name}-{folder.name}-a{number}",
            runtime_env={"env_vars": {MARK: environment[MARK]}, **runtime_env},
        )
        deadline = time.monotonic() + PID_S
        while not note.read_text().endswith("\n"):
            assert time.monotonic() < deadline, f"{self.id} did not begin: {client.get_job_info(self.id)}"
            time.sleep(POLL_S)
        self.pid = int(note.read_text())

    @property
    def status(self) -> JobStatus:
        return self._client.get_job_status(self.id)

    @property
    def returncode(self) -> int | None:
        """Of a job that was stopped Ray does not tell it: 0."""
        info = self._client.get_job_info(self.id)
        return (info.driver_exit_code or 0) if info.status.is_terminal() else None

    def stop(self) -> None:
        """As `ray job stop` does: SIGTERM, and SIGKILL three seconds later."""
        self._client.stop_job(self.id)


class AsJob(Scenario):
    """Driven as always. `jobs` is the cluster that the next attempt is submitted to."""

    def __init__(self, jobs: Nodes, runtime_env: Mapping[str, Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runtime_env = runtime_env
        self.move(jobs)

    def move(self, jobs: Nodes) -> Self:
        """The next attempt is submitted there."""
        client = JobSubmissionClient(jobs.dashboard)
        self._command = lambda *arguments: Submitted(client, self._runtime_env, *arguments)
        return self

    def stop_job(self) -> Self:
        """`ray job stop`, and the job's end."""
        assert isinstance(self._driver, Submitted)
        self._driver.stop()
        self._let_stop()
        assert self._driver.status is JobStatus.STOPPED
        return self.finish()

    def forget(self) -> Self:
        """The driver's cluster is gone, so nobody can be asked about it any more; nothing of it is left."""
        self._driver = None
        self._processes.all_gone(within=DEADLINE_S)
        return self

    @property
    def job_status(self) -> JobStatus:
        assert isinstance(self._driver, Submitted)
        return self._driver.status
