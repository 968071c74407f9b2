"""The Ray Data pipeline gives the same rows as the in-process reader, whoever asks and whatever dies."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.exceptions import RayActorError

from worldline.data.block import Block, encode
from worldline.data.feeder import FeederSource, start_feeder
from worldline.data.ledger import rows_digest
from worldline.data.loader import Loader
from worldline.data.manifest import DataError, Manifest
from worldline.data.plan import Plan
from worldline.data.reader import LocalSource, WindowReader
from worldline.data.scan import scan
from worldline.data.transform import load_transform
from worldline.world import assign

pytestmark = pytest.mark.cluster

WAIT_S = 120.0
SHARDS = 4

TRANSFORMS = """
import os, pathlib, signal
import numpy as np

def encode(columns):
    pair = np.stack([columns["x"], columns["x"] * 2], axis=1)
    return {"id": columns["id"], "pair": pair, "text": np.array([name + "!" for name in columns["name"]])}

def die_once(columns):
    marker = pathlib.Path(__file__).with_name("died")
    if (columns["id"] == 1234).any() and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(columns)

def refuse_one(columns):
    if (columns["id"] == 1234).any():
        raise ValueError("row 1234 is damaged")
    return encode(columns)
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Data, and a module of transforms that only `import_paths` makes known to the data tasks."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        (path / "wl_feeder_transforms.py").write_text(TRANSFORMS)
        sys.path.append(name)
        rng, first = np.random.default_rng(0), 0
        for i, size in enumerate((700, 100, 1300, 200, 800)):
            ids = np.arange(first, first + size)
            table = {
                "id": ids,
                "x": rng.normal(size=size).astype(np.float32),
                "name": [f"row {row}" for row in ids],
            }
            pq.write_table(pa.table(table), path / f"part-{i}.parquet", row_group_size=150)
            first += size
        yield path
        sys.path.remove(name)


@pytest.fixture(scope="module", autouse=True)
def cluster(folder: Path) -> Iterator[None]:
    temporary = tempfile.mkdtemp(prefix="wl", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", temporary)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20)
        yield
        ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return scan(str(folder))


def plan(manifest: Manifest, transform: str = "encode") -> Plan:
    return Plan(
        manifest,
        seed=9,
        num_shards=SHARDS,
        rows_per_shard=16,
        window_rows=100,
        transform=f"wl_feeder_transforms:{transform}",
    )


def reader(plan: Plan, transform: str = "encode") -> WindowReader:
    return WindowReader(plan.manifest, None, load_transform(f"wl_feeder_transforms:{transform}"))


def same(a: Block, b: Block) -> bool:
    return bool(encode(a).equals(encode(b))) and all(
        (a.columns[name].dtype, a.columns[name].tobytes())
        == (b.columns[name].dtype, b.columns[name].tobytes())
        for name in ("id", "pair")
    )


def digests(loader: Loader, steps: range, shards: range) -> dict[tuple[int, int], tuple[int, int]]:
    """(step, shard) -> digests of the row ids and of the bytes of a column."""
    loader.focus(shards, steps.start)
    found = {}
    for step in steps:
        for shard in shards:
            batches = loader.batches(step, shard, WAIT_S)
            ids = np.concatenate([b.row_ids for b in batches]) if batches else np.zeros(0, np.int64)
            pairs = [np.ascontiguousarray(b.columns["pair"]).tobytes() for b in batches]
            content = np.frombuffer(b"".join(pairs), dtype=np.int64)
            found[step, shard] = (rows_digest(ids), rows_digest(content))
    return found


@ray.remote(num_cpus=0)
class Consumer:
    """A worker as far as data goes."""

    def __init__(self, path: str) -> None:
        sys.path.append(path)

    def open(self, feeder: Any, plan: Plan) -> None:
        source = FeederSource(feeder, reader(plan), plan)
        self.loader = Loader(plan, source, micro_rows=5, timeout_s=WAIT_S)

    def digests(self, steps: range, shards: range) -> dict[tuple[int, int], tuple[int, int]]:
        return digests(self.loader, steps, shards)


def test_rows_are_the_same_for_any_world_and_start(manifest: Manifest, folder: Path) -> None:
    """Worlds 1 -> 3 -> 2 in the middle of an epoch, and a start from the middle, against one local reader."""
    p = plan(manifest)
    end = p.steps_per_epoch + 20
    loader = Loader(p, LocalSource(reader(p), p), micro_rows=16)
    expected = digests(loader, range(1, end + 1), range(SHARDS))
    loader.close()
    consumers = [Consumer.remote(str(folder)) for _ in range(3)]
    for start, worlds in [(1, [(1, 15), (3, 40), (2, end + 1)]), (33, [(2, end + 1)])]:
        feeder = start_feeder(p, first_step=start, last_step=end, import_paths=[str(folder)])
        ray.get([consumer.open.remote(feeder, p) for consumer in consumers], timeout=WAIT_S)
        found: dict[tuple[int, int], tuple[int, int]] = {}
        step = start
        for replicas, until in worlds:
            calls = [
                consumer.digests.remote(range(step, until), share.shards)
                for consumer, share in zip(consumers, assign(SHARDS, replicas), strict=False)
            ]
            for part in ray.get(calls, timeout=WAIT_S):
                found |= part
            step = until
        assert found == {(s, v): d for (s, v), d in expected.items() if s >= start}
        stats = ray.get(feeder.stats.remote())
        assert stats["failures"] == 0
        # Everything within the run came from Ray Data; consumers read ahead beyond its end by themselves.
        assert stats["given"] >= len(list(p.needs(p.first_need(start), end)))
        ray.kill(feeder)


def test_a_killed_read_worker_changes_nothing(manifest: Manifest, folder: Path) -> None:
    p = plan(manifest, "die_once")
    steady = LocalSource(reader(p), p)
    feeder = start_feeder(p, first_step=1, last_step=p.steps_per_epoch, import_paths=[str(folder)])
    source = FeederSource(feeder, reader(p), p)
    for need in p.needs(p.first_need(1), p.steps_per_epoch):
        assert same(source.fetch(need.key, WAIT_S), steady.fetch(need.key, WAIT_S))
    assert (folder / "died").exists()
    assert source.misses == 0
    ray.kill(feeder)


def test_an_error_of_the_transform_surfaces_at_its_row_only(manifest: Manifest, folder: Path) -> None:
    p = plan(manifest, "refuse_one")
    steady = LocalSource(reader(p), p)
    feeder = start_feeder(p, first_step=1, last_step=p.steps_per_epoch, import_paths=[str(folder)])
    source = FeederSource(feeder, reader(p, "refuse_one"), p)
    for need in p.needs(p.first_need(1), p.steps_per_epoch):
        if 1234 in p.window(*need.key).row_ids:
            with pytest.raises(DataError, match="refuse_one raised ValueError: row 1234 is damaged"):
                source.fetch(need.key, WAIT_S)
        else:
            assert same(source.fetch(need.key, WAIT_S), steady.fetch(need.key, WAIT_S))
    ray.kill(feeder)


def test_what_the_feeder_has_not_is_read_again(manifest: Manifest, folder: Path) -> None:
    """Little room; a run set back; a feeder that dies, and one that is gone."""
    p = plan(manifest)
    steady = LocalSource(reader(p), p)
    last = p.steps_per_epoch
    needs = list(p.needs(p.first_need(1), last))
    feeder = start_feeder(p, first_step=1, last_step=last, import_paths=[str(folder)], max_bytes=10_000)
    source = FeederSource(feeder, reader(p), p)

    def fetch_all() -> None:
        for need in needs:
            assert same(source.fetch(need.key, WAIT_S), steady.fetch(need.key, WAIT_S))

    fetch_all()
    assert source.misses == 0
    assert ray.get(feeder.stats.remote())["held_bytes"] < 20_000
    # From the beginning again: a few windows are read here until the pipeline has begun there again.
    fetch_all()
    stats = ray.get(feeder.stats.remote())
    assert stats["restarts"] == 1
    assert 2 * SHARDS < stats["missed"] < len(needs)
    # The feeder dies: reading goes on, and when Ray has started it again it takes up where it is asked.
    ray.kill(feeder, no_restart=False)
    for _ in range(100):
        fetch_all()
        with contextlib.suppress(RayActorError):
            if ray.get(feeder.stats.remote(), timeout=WAIT_S)["given"] > 0:
                break
    else:
        pytest.fail("the feeder did not come back")
    # The feeder is gone.
    ray.kill(feeder)
    before = source.misses
    fetch_all()
    assert source.misses == before + len(needs)
