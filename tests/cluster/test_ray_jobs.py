"""`worldline run` under `ray job submit`: stopped, killed, the whole cluster lost, and submitted anew.

| what must hold | report |
| --- | --- |
| driver, head or cluster die: the next submission goes on with the run; no orphans, one MLflow run | F3 |
| after success, failure, cancel and SIGKILL nothing of the run is left on the cluster | F9 |
| a node that cannot set the job's environment up is left out with the reason; who comes late gets it | F11 |
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from ray.job_submission import JobStatus
from tests.cluster.cases import EVERYTHING, Case
from tests.cluster.conftest import settings_of
from tests.cluster.forks import Forks
from tests.cluster.nodes import Nodes
from tests.cluster.submitted import AsJob

pytestmark = pytest.mark.cluster


class Place:
    """Where jobs are submitted to: one cluster after the other, with room for two workers on its head."""

    def __init__(self, root: Path, forks: Forks) -> None:
        self._root = root
        self._forks = forks
        self.started: list[Nodes] = []
        self._lost = True

    def now(self) -> Nodes:
        if self._lost:
            folder = self._root / f"jobs{len(self.started)}"
            head = {"num_cpus": 2, "include_dashboard": True, "dashboard_agent_listen_port": 0}
            self.started.append(Nodes(folder, num=0, forks=self._forks, **head))
            self._lost = False
        return self.started[-1]

    def lose(self) -> None:
        """All its machines are switched off."""
        self.now().lose_all()
        self._lost = True


@pytest.fixture(scope="module")
def place(root: Path, forks: Forks) -> Iterator[Place]:
    place = Place(root, forks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S", "1")
        yield place
    for jobs in place.started:
        jobs.close()


@pytest.fixture
def jobs(place: Place) -> Nodes:
    jobs = place.now()
    jobs.make_whole()
    return jobs


@pytest.fixture
def submit(make, jobs: Nodes) -> Iterator[Callable[..., AsJob]]:
    begun: list[AsJob] = []

    def submit(
        case: Case, workers: int = 2, runtime_env: Mapping[str, object] | None = None, **settings
    ) -> AsJob:
        kind = partial(AsJob, jobs, runtime_env or {})
        run = make(case, jobs.address, settings_of(case, workers, settings), kind)
        begun.append(run)
        return run

    yield submit
    for run in begun:
        run.close()


def test_stopped_killed_and_submitted_again(submit, jobs, undisturbed) -> None:
    """`ray job stop`; SIGKILL for the driver; to the end. One line, one MLflow run, nothing left behind."""
    run = submit(EVERYTHING, tracking__enabled=True, checkpoint__every_steps=10).start().at(step=6)
    run.stop_job()
    stopped = len(run.steps)
    assert run.checkpoints == [stopped]
    assert run.status["state"] == "STOPPED"
    jobs.check_idle()
    run.start().at(step=stopped + 5)
    run.until(lambda: 10 in run.checkpoints, "the checkpoint")
    run.kill_driver()
    jobs.check_idle()
    assert run.job_status is JobStatus.FAILED
    run.start().finish()
    assert run.job_status is JobStatus.SUCCEEDED
    jobs.check_idle()
    assert [step["attempt"] for step in run.steps] == [1] * stopped + [2] * (10 - stopped) + [3] * 30
    assert run.line == undisturbed(EVERYTHING)
    assert run.tracked.status == "FINISHED"
    assert run.tracked.tags["attempt"] == "3"


def test_the_environment_of_a_job_on_a_node_that_comes_late(submit, jobs, undisturbed, tmp_path) -> None:
    """The job's package has long been fetched by the others. On one node it cannot be unpacked."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("")
    run = submit(EVERYTHING, workers=3, runtime_env={"working_dir": str(tmp_path / "package")})
    run.start(whole=False).grow(to=2)
    broken = jobs.add(temp_dir=f"{jobs.folder}-b")
    place = Path(broken.session) / "runtime_resources" / "working_dir_files"
    shutil.rmtree(place, ignore_errors=True)
    place.touch()
    note = Path(broken.session) / "logs" / "raylet.err"

    def failed() -> bool:
        """Ray either tries again for ever, or gives the worker up, and then the run says why."""
        reasons = [event["reason"] for event in run.events("worker_start_failed")]
        return "working_dir_files" in note.read_text() or any("its runtime environment" in r for r in reasons)

    run.until(failed, "the failed start")
    assert run.more(steps=2).status["world"] == 2
    jobs.lose(broken)
    jobs.add(temp_dir=f"{jobs.folder}-c")
    run.grow().finish()
    assert not run.events("worker_lost")
    assert run.line == undisturbed(EVERYTHING)


def test_a_cluster_is_lost_and_another_takes_over(submit, place, undisturbed) -> None:
    """All machines are switched off, the driver's with them."""
    run = submit(EVERYTHING, checkpoint__every_steps=10).start().at(step=14)
    run.until(lambda: run.checkpoints == [10], "the checkpoint")
    place.lose()
    run.forget().move(place.now()).start().finish()
    assert [step["attempt"] for step in run.steps] == [1] * 10 + [2] * 30
    assert run.line == undisturbed(EVERYTHING)
