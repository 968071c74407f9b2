"""A bad job names its key, what was expected and what was found; a good one loads as it is written."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from worldline.job.load import (
    JobError,
    identity,
    import_attribute,
    job_digest,
    load_job,
    load_task,
    search_path,
)
from worldline.job.spec import TaskSpec

GOOD: dict[str, Any] = {
    "name": "a",
    "task": {"class": "m:T"},
    "data": {"train": {"path": "d"}},
    "batch": {"logical_shards": 8, "rows_per_shard": 4},
    "steps": 10,
}

TASKS = """
import torch, worldline

class Good(worldline.Task):
    def __init__(self, width=4, *, lr):
        if width < 1:
            raise ValueError("width must be positive")
        self.width, self.lr = width, lr
    def build_model(self): return torch.nn.Linear(self.width, 1)
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=self.lr)
    def loss(self, model, batch): return model(batch["x"]).mean()

class Partial(worldline.Task):
    def build_model(self): return torch.nn.Linear(1, 1)

def function(): pass
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return path


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_process: None) -> list[Path]:
    (tmp_path / "load_tasks.py").write_text(TASKS)
    (tmp_path / "load_broken.py").write_text("1 / 0")
    (tmp_path / "load_needs.py").write_text("import not_installed_anywhere")
    for name in ("load_tasks", "load_broken", "load_needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return [tmp_path]


def faults(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    return caught.value.faults


def test_loads_with_defaults_and_overrides(job_file: Path) -> None:
    job = load_job(job_file, ["world.max=4", "gradient.clip_norm=1e-1", "task.args.lr=3e-4", "tracking.uri="])
    assert (job.name, job.world.max, job.gradient.clip_norm) == ("a", 4, 0.1)
    assert job.task.args == {"lr": 3e-4}
    assert job.tracking.uri is None
    assert job.batch.global_rows == 32


def test_json_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        '{"name": "a", "task": {"class": "m:T", "args": {}},\n "data": {"train": {"path": "d"}},'
        '"batch": {"logical_shards": 2, "rows_per_shard": 1}, "epochs": 1}'
    )
    assert load_job(path).epochs == 1


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("world.max=0", "world.max: expected a number greater than 0, found 0"),
        ("world.max=many", "world.max: expected a valid integer, found 'many'"),
        ("world.mx=3", "world.mx: unknown key; did you mean 'world.max'?"),
        ("max=3", "max: unknown key; did you mean 'world.max'?"),
        (
            "world.cat=3",
            "world.cat: unknown key; there is cpus_per_worker, gpus_per_worker, max, min, standby, threads",
        ),
        (
            "data.train.transfrom=m:f",
            "data.train.transfrom: unknown key; did you mean 'data.train.transform'?",
        ),
        ("data.train.columns=[a, 2]", "data.train.columns[1]: expected a valid string, found 2"),
        ("task.class=m.T", """task.class: expected "module:Class", found 'm.T'"""),
        ("name=a b", "name: expected letters, digits, '.', '_' and '-', found 'a b'"),
        ("mode=fast", "mode: expected 'bitwise' or 'same_batches', found 'fast'"),
        ("checkpoint=3", "checkpoint: expected keys with values, found 3"),
        ("data=", "data: expected keys with values, found None"),
        ("batch.logical_shards=12", "batch: logical_shards must be a power of two, not 12"),
        ("world={min: 3, max: 2}", "world: min (3) must not exceed max (2)"),
        ("world.max=9", "job: world.max (9) must not exceed batch.logical_shards (8)"),
        (
            "epochs=1",
            "job: steps (10) and epochs (1) are both given: take one out; over a job file, --set steps=null "
            "or --set epochs=null does",
        ),
        ("steps=", "job: neither steps nor epochs is given: say how long to train, with one of them"),
        ("evaluate.every_steps=5", "job: evaluate needs data.validation"),
        ("world.max", "--set world.max: expected KEY=VALUE"),
        ("=3", "--set =3: expected KEY=VALUE"),
        ("name.x=3", "--set name.x=3: name has no keys"),
        ("steps=[1", "--set steps=[1: the value is not YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_a_fault_names_the_key(job_file: Path, override: str, fault: str) -> None:
    assert faults(job_file, override) == (fault,)


def test_steps_give_way_to_epochs_as_the_fault_says(job_file: Path) -> None:
    job = load_job(job_file, ["epochs=2", "steps=null"])
    assert (job.steps, job.epochs) == (None, 2)


def test_all_faults_at_once(job_file: Path) -> None:
    found = faults(job_file, "world.max=0", "mode=fast", "seed=-1", "nonsense")
    assert len(found) == 4


def test_a_missing_key(tmp_path: Path) -> None:
    job = copy.deepcopy(GOOD)
    del job["batch"]["rows_per_shard"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    expected = "batch.rows_per_shard: expected a value, found none; this key is required"
    assert faults(path) == (expected,)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name: a\ntask: {class: m:T\nsteps: 3\n", ", line 3: "),
        ("name: a\nsteps: 3\nsteps: 4\n", ", line 3: 'steps' is given twice"),
        ("", ": expected keys with values, found nothing"),
        ("- a\n", ": expected keys with values, found ['a']"),
        (b"name: \xff\n", ": expected UTF-8 text, found byte 0xff"),
    ],
)
def test_a_file_that_is_no_job(tmp_path: Path, text: str | bytes, fault: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (found,) = faults(path)
    assert found.startswith(f"{path}{fault}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.yaml") == (f"{tmp_path / 'none.yaml'}: No such file or directory",)


def test_search_path_is_the_jobs_folder_then_the_working_directory(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert search_path(job_file) == [job_file.parent, elsewhere]
    monkeypatch.chdir(job_file.parent)
    assert search_path("job.yaml") == [job_file.parent]


def test_load_task_constructs_it(search: list[Path]) -> None:
    task = load_task(TaskSpec(class_="load_tasks:Good", args={"lr": 0.1}), search)
    assert (task.width, task.lr) == (4, 0.1)  # type: ignore[attr-defined]
    assert import_attribute("load_tasks:Good", search) is type(task)


@pytest.mark.parametrize(
    ("name", "args", "fault"),
    [
        (
            "load_tasks:Good",
            {"lr": 1, "widht": 2},
            "task.args.widht: unknown argument; did you mean 'width'?",
        ),
        ("load_tasks:Good", {}, "task.args.lr: expected a value, found none; the task has no default for it"),
        (
            "load_tasks:Good",
            {"lr": 1, "width": 0},
            "task.args: load_tasks:Good raised ValueError: width must be positive "
            "(load_tasks.py:7, in __init__)",
        ),
        ("load_tasks:Goof", {}, "task.class: 'load_tasks' has no 'Goof'; did you mean 'Good'?"),
        ("load_tasks:Partial", {}, "task.class: load_tasks:Partial must define build_optimizer, loss"),
        (
            "load_tasks:function",
            {},
            "task.class: expected a subclass of worldline.Task, found <function function",
        ),
        (
            "load_broken:T",
            {},
            "task.class: importing 'load_broken' raised ZeroDivisionError: division by zero "
            "(load_broken.py:1, in <module>)",
        ),
        (
            "load_needs:T",
            {},
            "task.class: module 'load_needs' itself imports 'not_installed_anywhere', not installed",
        ),
        ("load_nowhere:T", {}, "task.class: no module 'load_nowhere' in "),
    ],
)
def test_a_task_that_does_not_fit(search: list[Path], name: str, args: dict[str, Any], fault: str) -> None:
    with pytest.raises(JobError) as caught:
        load_task(TaskSpec(class_=name, args=args), search)
    (found,) = caught.value.faults
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "batch.rows_per_shard=2",
        "task.args.x=1",
        "gradient.clip_norm=1",
        "precision=bf16",
        "mode=same_batches",
        "world.threads=2",
        "data.window_rows=10",
        "data.shuffle=false",
    ],
)
def test_what_decides_the_numbers_is_identity(job_file: Path, override: str) -> None:
    before, after = load_job(job_file), load_job(job_file, [override])
    key, _, _ = override.partition("=")
    changed = {
        k for k in identity(before) | identity(after) if identity(before).get(k) != identity(after).get(k)
    }
    assert key in changed
    assert job_digest(before) != job_digest(after)


@pytest.mark.parametrize(
    "override",
    [
        "name=b",
        "world.max=4",
        "world.standby=1",
        "steps=20",
        "checkpoint.every_steps=3",
        "tracking.enabled=false",
        "failure.task_errors=1",
        "data.pipeline=local",
        "data.cpus=2",
        "digest_every_steps=1",
    ],
)
def test_what_may_change_between_attempts_is_not(job_file: Path, override: str) -> None:
    assert job_digest(load_job(job_file)) == job_digest(load_job(job_file, [override]))


def test_identity_is_flat_and_leaves_defaults_out(job_file: Path) -> None:
    """So a setting that a later version adds does not make the runs of before another line."""
    job = load_job(job_file, ["task.args.betas=[0.9, 0.95]", "gradient.clip_norm=1"])
    assert identity(job) == {
        "task.class": '"m:T"',
        "task.args.betas": "[0.9, 0.95]",
        "data.train.path": '"d"',
        "batch.logical_shards": "8",
        "batch.rows_per_shard": "4",
        "gradient.clip_norm": "1.0",
    }


def test_a_job_error_comes_from_a_worker_as_it_was() -> None:
    error = JobError(["a: one", "b: another"])
    there = pickle.loads(pickle.dumps(error))
    assert (there.faults, str(there)) == (error.faults, str(error))
