"""A run's identity: made once, checked by every later attempt, set aside as a whole."""

import json

import pytest

from worldline.control.lease import Lease, LeaseHeld
from worldline.control.runs import RUN, identity_faults, keep_manifest, open_run, set_aside
from worldline.data.manifest import Manifest
from worldline.data.scan import scan
from worldline.job.faults import JobError
from worldline.job.spec import Job
from worldline.storage import open_storage

JOB = {
    "name": "run",
    "task": {"class": "tasks:Net"},
    "data": {"train": {"path": "data"}},
    "batch": {"logical_shards": 8, "rows_per_shard": 4},
    "steps": 10,
}


def job(**changes):
    return Job.model_validate(JOB | changes)


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path / "runs")).child("run")


def write_rows(folder, name, values):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": values}), folder / name)


def test_the_first_attempt_makes_it_and_the_next_finds_it(storage):
    first = open_run(storage, job())
    assert json.loads(storage.get(RUN)) == first
    assert open_run(storage, job()) == first


@pytest.mark.parametrize(
    "free",
    [
        {"world": {"min": 2, "max": 4}},
        {"checkpoint": {"every_steps": 7}},
        {"failure": {"task_errors": 9}},
        {"tracking": {"enabled": False}},
    ],
)
def test_what_does_not_decide_the_numbers_may_change(storage, free):
    open_run(storage, job())
    open_run(storage, job(**free))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 5}, "seed"),
        ({"batch": {"logical_shards": 4, "rows_per_shard": 4}}, "batch.logical_shards"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_what_decides_the_numbers_may_not(storage, change, named):
    open_run(storage, job())
    before = storage.get(RUN)
    with pytest.raises(JobError, match=named.replace(".", r"\.")) as caught:
        open_run(storage, job(**change))
    assert "put it back, give the job another name" in str(caught.value)
    assert storage.get(RUN) == before


def test_a_setting_that_is_new_or_gone_is_named():
    [new, gone] = identity_faults({"a": "1"}, {"b": "2"})
    assert new.startswith("a: the run was begun with 1, the job now says its default")
    assert gone.startswith("b: the run was begun with its default, the job now says 2")


def test_the_data_set_is_kept_and_compared(storage, tmp_path):
    folder = tmp_path / "data"
    write_rows(folder, "a.parquet", [1, 2])
    write_rows(folder, "b.parquet", [3])
    found = scan(str(folder))
    assert keep_manifest(storage, "data/manifest.json", found, "data.train") is found
    assert Manifest.from_json(storage.get("data/manifest.json").decode()).digest == found.digest
    kept = keep_manifest(storage, "data/manifest.json", scan(str(folder)), "data.train")
    assert kept.digest == found.digest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "b.parquet").unlink(), "b.parquet is gone"),
        (lambda folder: write_rows(folder, "c.parquet", [1]), "c.parquet is new"),
        (lambda folder: write_rows(folder, "a.parquet", [9, 9, 9]), "a.parquet has changed"),
    ],
)
def test_another_data_set_is_refused_by_file(storage, tmp_path, change, named):
    folder = tmp_path / "data"
    write_rows(folder, "a.parquet", [1, 2])
    write_rows(folder, "b.parquet", [3])
    keep_manifest(storage, "data/manifest.json", scan(str(folder)), "data.train")
    change(folder)
    with pytest.raises(JobError, match=named):
        keep_manifest(storage, "data/manifest.json", scan(str(folder)), "data.train")


def test_other_columns_are_another_data_set(storage, tmp_path):
    folder = tmp_path / "data"
    write_rows(folder, "a.parquet", [1, 2])
    found = scan(str(folder))
    keep_manifest(storage, "data/manifest.json", found, "data.train")
    with pytest.raises(JobError, match="the columns differ"):
        keep_manifest(storage, "data/manifest.json", with_column_y(found), "data.train")


def with_column_y(manifest):
    return Manifest.from_json(manifest.to_json().replace('"x"', '"y"'))


def test_setting_aside_keeps_every_run(tmp_path):
    url = str(tmp_path)
    assert set_aside(url, "run") is None
    for number in (1, 2):
        open_run(open_storage(url).child("run"), job())
        aside = set_aside(url, "run")
        assert aside == tmp_path / f"run.{number}"
        assert (aside / RUN).exists()
        assert not (tmp_path / "run").exists()


def test_a_run_that_a_driver_has_is_not_set_aside(tmp_path):
    storage = open_storage(str(tmp_path)).child("run")
    open_run(storage, job())
    lease = Lease.acquire(storage)
    with pytest.raises(LeaseHeld):
        set_aside(str(tmp_path), "run")
    assert storage.get(RUN)
    lease.release()
