"""The example jobs: their files load, their data scripts write what they read, their tasks learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from worldline.cli.plan import train_plan
from worldline.data.loader import Loader
from worldline.data.reader import LocalSource, WindowReader, load_transform
from worldline.data.scan import scan
from worldline.job.fingerprint import make_deterministic
from worldline.job.load import load_job, load_task
from worldline.job.spec import Job
from worldline.task import Task

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both data sets, written by their scripts."""
    folder = tmp_path_factory.mktemp("data")
    for script, name in (("stdlib_text", "stdlib"), ("digits_data", "digits")):
        run_script(script, folder / name)
    return folder


@pytest.fixture(autouse=True)
def _like_a_worker(restore_process: None) -> None:
    make_deterministic(1)
    torch.manual_seed(0)


def run_script(name: str, target: Path) -> str:
    command = [sys.executable, ROOT / "jobs" / f"{name}.py", target]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def plain_loop(job: Job, steps: int) -> tuple[Task, torch.nn.Module, list[float]]:
    """The job's steps without any of Worldline's machinery but its data: what a user's own loop would do."""
    task = load_task(job.task, [ROOT])
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer)
    samples = train_plan(job, [ROOT])
    transform = load_transform(job.data.train.transform or "")
    loader = Loader(
        samples,
        LocalSource(WindowReader(samples.manifest, None, transform), samples),
        job.batch.rows_per_shard,
    )
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for shard in range(samples.num_shards):
            (batch,) = loader.batches(step, shard)
            loss = task.loss(model, batch.columns) / samples.num_shards
            loss.backward()
            total += loss.item()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    loader.close()
    return task, model, losses


def test_gpt_learns(data: Path) -> None:
    job = load_job(
        ROOT / "jobs/stdlib-gpt.yaml", [f"data.train.path={data}/stdlib", "batch.rows_per_shard=1"]
    )
    _, _, losses = plain_loop(job, 20)
    assert losses[0] > 5
    assert losses[-1] < 3.6


def test_gpt_ties_its_head_and_warms_up() -> None:
    job = load_job(ROOT / "jobs/stdlib-gpt.yaml")
    task = load_task(job.task, [ROOT])
    model = task.build_model()
    names = [name for name, _ in model.named_parameters()]
    assert sum("token" in name or "head" in name for name in names) == 1
    rates = [task.rate(step) for step in range(302)]  # type: ignore[attr-defined]
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert max(rates) == 1
    assert rates[300] == rates[301] == pytest.approx(0.1)


def test_digits_are_recognised(data: Path) -> None:
    folder = data / "digits"
    job = load_job(ROOT / "jobs/digits.yaml", [f"data.train.path={folder}/train.parquet"])
    task, model, _ = plain_loop(job, 48)
    held_out = load_job(ROOT / "jobs/digits.yaml", [f"data.train.path={folder}/validation.parquet"])
    samples = train_plan(held_out, [ROOT])
    reader = WindowReader(samples.manifest, None, load_transform("jobs.digits:encode"))
    model.eval()
    right = rows = 0.0
    for shard in range(samples.num_shards):
        block = reader.read(samples.window(0, shard, 0))
        batch = {name: torch.from_numpy(values.copy()) for name, values in block.columns.items()}
        right += float(task.evaluate(model, batch)["accuracy"]) * block.num_rows
        rows += block.num_rows
    assert rows == 261
    assert right / rows > 0.95


def test_no_shard_of_digits_meets_a_single_row(data: Path) -> None:
    job = load_job(ROOT / "jobs/digits.yaml", [f"data.train.path={data}/digits/train.parquet"])
    samples = train_plan(job, [ROOT])
    steps = range(1, samples.steps_per_epoch + 1)
    assert {rows for step in steps for rows in samples.step_rows(step)} == {8}


def test_stdlib_text_is_the_same_every_time(data: Path, tmp_path: Path) -> None:
    run_script("stdlib_text", tmp_path / "again")
    first, again = scan(str(data / "stdlib")), scan(str(tmp_path / "again"))
    assert first.digest == again.digest
    assert len(first.files) > 1
    assert min(len(file.row_groups) for file in first.files) > 1
    lengths = {len(text) for text in pq.read_table(data / "stdlib" / first.files[0].path)["text"].to_pylist()}
    assert lengths == {129}


def test_data_that_is_there_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    assert run_script("stdlib_text", target) == run_script("digits_data", target) == ""
    assert list(target.iterdir()) == []
