"""Storage: whole objects or none, whatever fails or dies."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import worldline.storage
from worldline.storage import LocalStorage, NotFound, Storage, StorageError, open_storage

SOURCE = str(Path(worldline.storage.__file__).parents[1])


@pytest.fixture
def storage(tmp_path) -> Storage:
    return open_storage(str(tmp_path / "runs"))


def all_files(storage) -> list[str]:
    return sorted(p.relative_to(storage.url).as_posix() for p in Path(storage.url).rglob("*") if p.is_file())


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_put_get_replace_list_delete(storage):
    assert storage.list() == []
    storage.put("a/b/one", b"1")
    storage.put("a/two", memoryview(b"22"))
    storage.put("a/two", b"222")
    assert storage.get("a/two") == b"222"
    assert storage.size("a/two") == 3
    assert storage.list() == ["a/b/one", "a/two"]
    assert storage.list("a/t") == ["a/two"]
    assert storage.list("a/b/") == ["a/b/one"]
    assert storage.list("none/") == []
    assert storage.child("a").list() == ["b/one", "two"]
    assert storage.child("a").get("b/one") == b"1"
    with storage.open_path("a/two") as path:
        assert path.read_bytes() == b"222"
    storage.delete("a/b")
    storage.delete("a/nothing")
    assert storage.list() == ["a/two"]


def test_missing_key_is_named(storage):
    for read in (storage.get, storage.size, lambda key: storage.open_path(key).__enter__()):
        with pytest.raises(NotFound, match="checkpoints/none"):
            read("checkpoints/none")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a//b", "a/./b", "a/../../b"])
def test_a_key_stays_below_the_root(storage, key):
    with pytest.raises(StorageError, match="not a key"):
        storage.put(key, b"")


def test_create_only_once(storage):
    assert storage.create("lease/1", b"mine")
    assert not storage.create("lease/1", b"yours")
    assert storage.get("lease/1") == b"mine"
    assert all_files(storage) == ["lease/1"]


def test_append_only_file(storage):
    path = storage.local_path("logs/steps.jsonl")
    with open(path, "a") as file:
        file.write("x")
    assert storage.get("logs/steps.jsonl") == b"x"


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_storage("runs").url == str(tmp_path / "runs")
    assert open_storage("file:///data/my%20runs").url == "/data/my runs"
    assert open_storage(open_storage("runs").url).url == open_storage("runs").url
    for url in ("s3://bucket/runs", "gs://bucket", "file://host/runs"):
        with pytest.raises(StorageError, match="only local folders are supported in this version"):
            open_storage(url)


def test_failed_write_leaves_the_old_content_and_nothing_else(storage):
    storage.put("x", b"old")

    def fails_in_the_middle(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match=r"cannot write x in .*: No space left on device") as caught:
        storage.put_file("x", fails_in_the_middle)
    assert caught.value.errno == errno.ENOSPC
    assert storage.get("x") == b"old"
    assert all_files(storage) == ["x"]


def test_other_exceptions_of_the_writer_pass_through(storage):
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        storage.put_file("x", fails)
    assert all_files(storage) == []


def test_a_file_in_the_way_of_a_folder(storage):
    storage.put("checkpoints", b"not a folder")
    for action in (
        lambda: storage.put("checkpoints/a", b""),
        lambda: storage.get("checkpoints/a"),
        lambda: storage.list("checkpoints/"),
    ):
        with pytest.raises(StorageError, match=r"checkpoints.*[Nn]ot a directory|checkpoints.*File exists"):
            action()
    assert all_files(storage) == ["checkpoints"]


def test_file_size_limit_is_an_error_and_leaves_nothing(storage):
    storage.put("big", b"old")
    done = run_python(
        """
        import resource, sys
        from worldline.storage import StorageError, open_storage
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            open_storage(sys.argv[1]).put("big", bytes(1 << 20))
        except StorageError as error:
            print(error)
        """,
        storage.url,
    )
    assert "cannot write big" in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert storage.get("big") == b"old"
    assert all_files(storage) == ["big"]


def test_what_a_killed_writer_left_is_not_listed_and_is_cleared(storage):
    done = run_python(
        """
        import os, signal, sys
        from worldline.storage import open_storage
        def write(path):
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        open_storage(sys.argv[1]).put_file("a/x", write)
        """,
        storage.url,
    )
    assert done.returncode == -signal.SIGKILL

    def alive(path: Path) -> None:
        path.write_bytes(b"whole")
        assert len(all_files(storage)) == 2
        assert storage.list() == []
        storage.clear_stale()
        assert len(all_files(storage)) == 1  # this one; the killed writer's is gone

    storage.put_file("a/y", alive)
    assert all_files(storage) == ["a/y"]


def test_temporary_files_of_other_machines_are_left_alone(storage):
    storage.put("a/x", b"")
    other = Path(storage.url, "a", ".writing-0123456789ab-1-1-00000000")
    other.touch()
    Path(storage.url, "a", ".writing-garbled").touch()
    storage.clear_stale()
    assert other.exists()
    assert storage.list() == ["a/x"]
    storage.delete("a")
    assert all_files(storage) == []


def _race(url, barrier, results, who):
    barrier.wait(timeout=60)
    results.put(LocalStorage(Path(url)).create("lease/1", bytes([who]) * 100_000))


def test_of_several_creators_one_wins(storage):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    racers = [context.Process(target=_race, args=(storage.url, barrier, results, who)) for who in range(6)]
    for racer in racers:
        racer.start()
    won = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(timeout=60)
    assert sorted(won) == [False] * 5 + [True]
    content = storage.get("lease/1")
    assert content == content[:1] * 100_000
    assert all_files(storage) == ["lease/1"]
