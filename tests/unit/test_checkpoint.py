"""Checkpoints: whole or passed over; a save that fails is seen and harms nothing."""

import errno
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import worldline.storage
from worldline.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    CheckpointManifest,
    directory,
    files_by_step,
    part_name,
    partition,
)
from worldline.checkpoint.part import write_part
from worldline.checkpoint.restore import NoUsableCheckpoint, candidates, find, read
from worldline.checkpoint.save import PartWriter, commit, prune
from worldline.storage import LocalStorage, StorageError, open_storage
from worldline.worker.state import TrainState, digest

SOURCE = str(Path(worldline.storage.__file__).parents[1])


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path / "run"))


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(5, 7, generator=generator),
        "model/odd": torch.randn(3, 5, generator=generator).t(),
        "model/half": torch.randn(9, generator=generator).bfloat16(),
        "model/mask": torch.tensor([True, False, True]),
        "model/empty": torch.empty(0, 4),
        "optimizer/weight/step": torch.tensor(float(step)),
        "optimizer/weight/exp_avg": torch.randn(5, 7, generator=generator, dtype=torch.float64),
    }


def manifest_of(step, parts, *, attempt=1, generation=1, **changes):
    values = {
        "step": step,
        "evaluated": False,
        "attempt": attempt,
        "generation": generation,
        "state_digest": hashlib.sha256(b"").hexdigest(),
        "plan_fingerprint": "plan",
        "numeric_fingerprint": {"torch": "2", "threads": 1},
        "job_digest": "job",
        "meta": {"lr": 0.1 + 0.2, "betas": {"$tuple": [0.9, 0.999]}, "big": 2**70},
        "files": {part.file: part.entry for part in parts},
        "tensors": {name: entry for part in parts for name, entry in part.tensors.items()},
    }
    return CheckpointManifest(**(values | changes))


def write_parts(storage, step, *, world=2, attempt=1, generation=1, tensors=None):
    tensors = tensors or state(step)
    shares = partition({name: tensor.nbytes for name, tensor in tensors.items()}, world)
    return [
        write_part(
            storage, directory(step), part_name(attempt, generation, rank), {n: tensors[n] for n in share}
        )
        for rank, share in enumerate(shares)
    ]


def save(storage, step, **options):
    issue = {key: options[key] for key in ("attempt", "generation") if key in options}
    manifest = manifest_of(step, write_parts(storage, step, **options), **issue)
    commit(storage, manifest)
    return manifest


def equal(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(
            a[n].contiguous().reshape(-1).view(torch.uint8), b[n].contiguous().reshape(-1).view(torch.uint8)
        )
        for n in a
    )


def files(storage):
    return sorted(p.relative_to(storage.url).as_posix() for p in Path(storage.url).rglob("*") if p.is_file())


def refuse(message):
    pytest.fail(f"unexpected warning: {message}")


class FailingStorage(LocalStorage):
    """Raises as a full disk does, after half the bytes, for keys that contain one of `failing`."""

    def __init__(self, root):
        super().__init__(root)
        self.failing = ()

    def put_file(self, key, write):
        def half(path):
            write(path)
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        super().put_file(key, half if any(part in key for part in self.failing) else write)

    def delete(self, key):
        if any(part in key for part in self.failing):
            raise StorageError(f"cannot delete {key}: Input/output error")
        super().delete(key)


# Names and shares.


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_partition_gives_every_tensor_once_and_balances(sizes, parts):
    shares = partition(sizes, parts)
    assert len(shares) == parts
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert partition(dict(reversed(sizes.items())), parts) == shares


def test_only_our_names_count():
    keys = [
        "checkpoints/step-00000050/manifest.json",
        "checkpoints/step-00000050/a1-g2-r0.safetensors",
        "checkpoints/step-100000000/manifest.json",
        "checkpoints/step-0000000050/manifest.json",
        "checkpoints/step-00000060/notes.txt",
        "checkpoints/latest/manifest.json",
        "checkpoints/step-00000070/sub/manifest.json",
    ]
    assert files_by_step(keys) == {
        50: ["manifest.json", "a1-g2-r0.safetensors"],
        100_000_000: ["manifest.json"],
    }


# The manifest.


def test_manifest_round_trips_exactly(storage):
    manifest = manifest_of(3, write_parts(storage, 3))
    again = CheckpointManifest.from_json(manifest.to_json())
    assert again == manifest
    assert repr(again.meta) == repr(manifest.meta)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[1]", "not that of a Worldline checkpoint"),
        (b'{"step": 3}', "not that of a Worldline checkpoint"),
        (b'{"format": "worldline-checkpoint-1"}', "checksum"),
    ],
)
def test_foreign_manifests_are_refused(text, reason):
    with pytest.raises(CheckpointError, match=reason):
        CheckpointManifest.from_json(text)


def test_any_changed_byte_of_a_manifest_is_noticed(storage):
    text = manifest_of(3, write_parts(storage, 3)).to_json().encode()
    for at in range(0, len(text), 37):
        changed = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
        with pytest.raises(CheckpointError):
            CheckpointManifest.from_json(changed)
        with pytest.raises(CheckpointError):
            CheckpointManifest.from_json(text[:at])


def test_a_manifest_that_is_wrong_in_itself_is_refused(storage):
    parts = write_parts(storage, 3)
    with pytest.raises(ValueError, match=r"no part of attempt 2, generation 1"):
        manifest_of(3, parts, attempt=2)
    with pytest.raises(ValueError, match="not among the files"):
        manifest_of(3, parts, files={})
    with pytest.raises(ValueError, match="step"):
        manifest_of(-1, parts)
    entry = parts[0].entry.model_copy(update={"size": -1})
    text = manifest_of(3, parts).model_copy(update={"files": {parts[0].file: entry}}).to_json()
    with pytest.raises(CheckpointError, match="size"):
        CheckpointManifest.from_json(text)


# Parts.


def test_parts_are_safetensors_files(storage):
    tensors = state(1)
    part = write_part(storage, directory(1), part_name(1, 1, 0), tensors)
    path = Path(storage.url, directory(1), part.file)
    assert equal(safetensors.torch.load_file(path), tensors)
    assert part.entry.size == path.stat().st_size
    assert part.entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_part_without_tensors(storage):
    save(storage, 1, world=3, tensors={"a": torch.ones(2)})
    assert equal(read(storage, find(storage, warn=refuse)), {"a": torch.ones(2)})


def test_a_dtype_without_a_name_is_refused(storage):
    with pytest.raises(CheckpointError, match=r"cannot store model/phase: .*complex128"):
        write_part(
            storage, directory(1), part_name(1, 1, 0), {"model/phase": torch.ones(2, dtype=torch.complex128)}
        )
    assert files(storage) == []


# Saving and finding.


@pytest.mark.parametrize("world", [1, 2, 5, 9])
def test_the_same_bits_come_back(storage, world):
    save(storage, 50, world=world)
    manifest = find(storage, warn=refuse)
    assert manifest.step == 50
    assert equal(read(storage, manifest), state(50))


def test_nothing_saved(storage):
    assert find(storage, warn=refuse) is None
    storage.put("run.json", b"{}")
    storage.put("checkpoints/readme.txt", b"")
    assert find(storage, warn=refuse) is None


def test_order_is_by_step_not_by_time(storage):
    for step in (100_000_000, 5, 20):
        save(storage, step)
    for key in storage.list("checkpoints/step-00000005/"):
        os.utime(storage.local_path(key), (2**33, 2**33))
    assert list(candidates(storage)) == [100_000_000, 20, 5]
    assert find(storage, warn=refuse).step == 100_000_000


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _foreign(path):
    path.write_text(json.dumps({"model": "somebody else's"}))


PART = part_name(1, 1, 1)
DAMAGES = {
    "manifest lost": (MANIFEST, Path.unlink, "never finished"),
    "manifest cut": (MANIFEST, lambda p: os.truncate(p, 100), "no JSON"),
    "manifest flipped": (MANIFEST, _flip, "JSON|checksum"),
    "manifest empty": (MANIFEST, lambda p: os.truncate(p, 0), "no JSON"),
    "manifest foreign": (MANIFEST, _foreign, "not that of a Worldline checkpoint"),
    "part lost": (PART, Path.unlink, "r1.safetensors is missing"),
    "part cut": (PART, lambda p: os.truncate(p, 100), "has 100 bytes instead of"),
    "part empty": (PART, lambda p: os.truncate(p, 0), "has 0 bytes instead of"),
    "part flipped": (PART, _flip, "content does not match its checksum"),
    "part grown": (PART, lambda p: p.write_bytes(p.read_bytes() + b"x"), "bytes instead of"),
    "part a folder": (PART, lambda p: (p.unlink(), p.mkdir()), "r1.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(storage, damage):
    name, harm, reason = DAMAGES[damage]
    save(storage, 10)
    save(storage, 20)
    harm(Path(storage.url, directory(20), name))
    warnings = []
    assert find(storage, warn=warnings.append).step == 10
    [warning] = warnings
    assert warning.startswith("checkpoint checkpoints/step-00000020 is passed over: ")
    assert re.search(reason, warning)


def test_the_manifest_of_another_step(storage):
    save(storage, 10)
    save(storage, 20)
    storage.put(f"{directory(20)}/{MANIFEST}", storage.get(f"{directory(10)}/{MANIFEST}"))
    warnings = []
    assert find(storage, warn=warnings.append).step == 10
    assert "is that of step 10" in warnings[0]


def test_all_but_the_oldest_damaged(storage):
    for step, damage in zip(
        (10, 20, 30, 40), (None, "part flipped", "manifest cut", "part lost"), strict=True
    ):
        save(storage, step)
        if damage:
            name, harm, _ = DAMAGES[damage]
            harm(Path(storage.url, directory(step), name))
    warnings = []
    manifest = find(storage, warn=warnings.append)
    assert manifest.step == 10
    assert len(warnings) == 3
    assert equal(read(storage, manifest), state(10))


def test_all_damaged_is_an_error_that_lists_each(storage):
    for step, damage in ((10, "part flipped"), (20, "manifest lost")):
        save(storage, step)
        name, harm, _ = DAMAGES[damage]
        harm(Path(storage.url, directory(step), name))
    with pytest.raises(NoUsableCheckpoint) as caught:
        find(storage, warn=lambda message: None)
    message = str(caught.value)
    assert "step-00000010: a1-g1-r1.safetensors: content does not match" in message
    assert "step-00000020: has no manifest.json" in message
    assert "--resume never" in message
    assert not caught.value.unfinished


def test_only_a_save_that_never_finished(storage):
    write_parts(storage, 10)
    with pytest.raises(NoUsableCheckpoint) as caught:
        find(storage, warn=lambda message: None)
    assert caught.value.unfinished


def test_damage_between_find_and_read_is_noticed(storage):
    save(storage, 10)
    manifest = find(storage, warn=refuse)
    _flip(Path(storage.url, directory(10), PART))
    with pytest.raises(CheckpointError, match=r"step-00000010/a1-g1-r1.safetensors"):
        read(storage, manifest)


def test_a_manifest_that_describes_other_tensors_than_the_file(storage):
    manifest = save(storage, 10)
    entry = manifest.tensors["model/weight"].model_copy(update={"shape": (10**15, 7)})
    wrong = manifest.model_copy(update={"tensors": manifest.tensors | {"model/weight": entry}})
    with pytest.raises(CheckpointError, match="other tensors than the manifest says"):
        read(storage, wrong)


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(storage):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    def train(model, optimizer, scheduler):
        for step in range(3):
            loss = model(torch.arange(24.0).reshape(8, 3) * step).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    original, fresh = build(0), build(1)
    train(*original)
    saved = TrainState(*original)
    parts = write_parts(storage, 3, world=2, tensors=saved.tensors())
    commit(
        storage, manifest_of(3, parts, meta=saved.meta(), state_digest=digest(saved.tensors(), saved.meta()))
    )

    manifest = find(storage, warn=refuse)
    loaded = TrainState(*fresh)
    loaded.load(read(storage, manifest), manifest.meta)
    assert digest(loaded.tensors(), loaded.meta()) == manifest.state_digest
    train(*original)
    train(*fresh)
    assert digest(loaded.tensors(), loaded.meta()) == digest(saved.tensors(), saved.meta())


# The commit.


def test_parts_that_are_not_there_are_not_committed(storage):
    parts = write_parts(storage, 10)
    path = Path(storage.url, directory(10), parts[1].file)
    os.truncate(path, 5)
    with pytest.raises(CheckpointError, match="has 5 bytes instead of"):
        commit(storage, manifest_of(10, parts))
    path.unlink()
    with pytest.raises(CheckpointError, match="all nodes must share this storage"):
        commit(storage, manifest_of(10, parts))
    assert f"{directory(10)}/{MANIFEST}" not in files(storage)


def test_parts_of_two_attempts_do_not_mix(storage):
    """Attempt 1 writes one of two parts and dies; attempt 2 saves the same step with other numbers."""
    old = {name: tensor * 0 for name, tensor in state(10).items() if tensor.dtype != torch.bool}
    write_part(storage, directory(10), part_name(1, 1, 0), old)
    save(storage, 10, attempt=2, generation=1)
    manifest = find(storage, warn=refuse)
    assert set(manifest.files) == {part_name(2, 1, 0), part_name(2, 1, 1)}
    assert equal(read(storage, manifest), state(10))
    prune(storage, keep=3, warn=refuse)
    assert files(storage) == sorted(f"{directory(10)}/{name}" for name in (*manifest.files, MANIFEST))


@pytest.mark.parametrize("older", [(1, 9), (2, 3)])
def test_an_older_generation_cannot_overwrite_a_commit(storage, older):
    new = save(storage, 10, attempt=2, generation=4)
    with pytest.raises(CheckpointError, match=r"committed by .* \(2, 4\), which is later than"):
        save(storage, 10, attempt=older[0], generation=older[1])
    assert find(storage, warn=refuse) == new
    newer = save(storage, 10, attempt=3, generation=1)
    assert find(storage, warn=refuse) == newer


def test_disk_full_at_the_commit_keeps_the_checkpoint_before(tmp_path):
    storage = FailingStorage(tmp_path)
    before = save(storage, 10)
    storage.failing = (MANIFEST,)
    with pytest.raises(StorageError, match=r"step-00000020/manifest.json .*No space left"):
        save(storage, 20)
    with pytest.raises(StorageError, match="No space left"):
        save(storage, 10, generation=2)
    assert find(storage, warn=lambda message: None) == before
    assert not [name for name in files(storage) if ".writing" in name]


def test_file_size_limit(storage):
    before = save(storage, 10)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import resource, sys, torch
                from worldline.checkpoint.part import write_part
                from worldline.storage import StorageError, open_storage
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
                try:
                    storage, tensors = open_storage(sys.argv[1]), {"a": torch.ones(1 << 20)}
                    write_part(storage, "checkpoints/step-00000020", "a1-g1-r0.safetensors", tensors)
                except StorageError as error:
                    print(error)
                """
            ),
            storage.url,
        ],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "a1-g1-r0.safetensors" in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert find(storage, warn=refuse) == before
    assert not [name for name in files(storage) if "step-00000020" in name]


# The writer.


class Results(queue.Queue):
    def next(self):
        return self.get(timeout=60)


def test_writer_writes_off_the_caller(storage):
    results = Results()
    writer = PartWriter(storage, results.put)
    writer.submit(10, part_name(1, 1, 0), state(10))
    result = results.next()
    assert (result.step, result.error) == (10, None)
    commit(storage, manifest_of(10, [result.info]))
    assert equal(read(storage, find(storage, warn=refuse)), state(10))
    assert writer.close(timeout=60)
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(20, part_name(1, 1, 0), state(20))


def test_a_failure_in_the_thread_is_a_result_and_the_next_save_works(tmp_path):
    storage, results = FailingStorage(tmp_path), Results()
    save(storage, 10, world=1)
    storage.failing = ("step-00000020",)
    writer = PartWriter(storage, results.put)
    for step in (20, 30):
        writer.submit(step, part_name(1, 1, 0), state(step))
        result = results.next()
        if step == 20:
            assert result.info is None
            assert "step-00000020/a1-g1-r0.safetensors" in result.error
            assert "No space left on device" in result.error
            assert find(storage, warn=refuse).step == 10
            assert "checkpoints/step-00000020/a1-g1-r0.safetensors" not in files(storage)
        else:
            commit(storage, manifest_of(step, [result.info]))
    assert writer.close(timeout=60)
    storage.failing = ()
    assert find(storage, warn=refuse).step == 30


def test_while_one_is_written_the_newest_waits(tmp_path):
    entered, go = threading.Event(), threading.Event()

    class Slow(LocalStorage):
        def put_file(self, key, write):
            entered.set()
            assert go.wait(timeout=60)
            super().put_file(key, write)

    results = Results()
    writer = PartWriter(Slow(tmp_path), results.put)
    writer.submit(10, part_name(1, 1, 0), state(10))
    assert entered.wait(timeout=60)
    for step in (20, 30, 40):
        writer.submit(step, part_name(1, 1, 0), state(step))
    assert not writer.close(timeout=0)
    go.set()
    assert writer.close(timeout=60)
    ended = [results.next() for _ in range(4)]
    assert [result.step for result in ended] == [10, 20, 30, 40]
    assert [result.info is not None for result in ended] == [True, False, False, True]
    assert "so slow that the checkpoint of step 40 came first" in ended[2].error


def test_a_callback_that_raises_does_not_end_the_writer(storage, caplog):
    results = Results()

    def on_result(result):
        results.put(result)
        if result.step == 10:
            raise RuntimeError("gone")

    writer = PartWriter(storage, on_result)
    for step in (10, 20):
        writer.submit(step, part_name(1, 1, 0), state(step))
        assert results.next().info
    assert writer.close(timeout=60)
    assert "of step 10 was not taken" in caplog.text


# What is deleted.


def test_prune_keeps_the_newest(storage):
    for step in (10, 20, 30, 40):
        save(storage, step)
    write_parts(storage, 5)  # never committed
    write_parts(storage, 35)  # never committed
    write_parts(storage, 50)  # being written
    prune(storage, keep=2, warn=refuse)
    assert sorted(files_by_step(storage.list())) == [30, 40, 50]
    assert not Path(storage.url, directory(35)).exists()
    assert find(storage, warn=lambda message: None).step == 40


def test_prune_does_not_count_what_was_passed_over(storage):
    """Attempt 2 had to go back to step 10 because step 30 is damaged: it is not the newest any more."""
    for step in (10, 30):
        save(storage, step)
    Path(storage.url, directory(30), PART).unlink()
    for step, left in ((12, [12, 30]), (14, [14, 30]), (30, [30])):
        save(storage, step, attempt=2)
        prune(storage, keep=1, warn=refuse)
        assert sorted(files_by_step(storage.list())) == left
        assert find(storage, warn=lambda message: None).step == step


def test_what_cannot_lose_its_manifest_keeps_its_parts(tmp_path):
    storage, warnings = FailingStorage(tmp_path), []
    for step in (10, 20):
        save(storage, step)
    storage.failing = (MANIFEST,)
    prune(storage, keep=1, warn=warnings.append)
    assert len(warnings) == 1
    assert equal(
        read(storage, CheckpointManifest.from_json(storage.get(f"{directory(10)}/{MANIFEST}"))), state(10)
    )


def test_prune_leaves_what_is_not_ours(storage):
    save(storage, 10)
    storage.put(f"{directory(20)}/{MANIFEST}", b"somebody else's")
    save(storage, 30)
    storage.put("checkpoints/notes.txt", b"")
    prune(storage, keep=1, warn=refuse)
    assert sorted(files_by_step(storage.list())) == [20, 30]
    assert "checkpoints/notes.txt" in files(storage)


def test_without_a_commit_nothing_is_deleted(storage):
    write_parts(storage, 10)
    write_parts(storage, 20)
    before = files(storage)
    prune(storage, keep=1, warn=refuse)
    assert files(storage) == before


def test_a_torn_delete_leaves_no_checkpoint_and_is_finished_later(tmp_path):
    class Torn(LocalStorage):
        def delete(self, key):
            if not key.endswith(MANIFEST):
                raise StorageError(f"cannot delete {key}: Input/output error")
            super().delete(key)

    for step in (10, 20):
        save(Torn(tmp_path), step)
    warnings = []
    prune(Torn(tmp_path), keep=1, warn=warnings.append)
    assert len(warnings) == 1
    assert "step-00000010: Input/output error" in warnings[0]
    assert MANIFEST not in files_by_step(Torn(tmp_path).list())[10]
    prune(LocalStorage(tmp_path), keep=1, warn=refuse)
    assert sorted(files_by_step(LocalStorage(tmp_path).list())) == [20]


def test_a_storage_that_cannot_be_listed_is_a_warning(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    warnings = []
    prune(LocalStorage(tmp_path), keep=1, warn=warnings.append)
    assert "old checkpoints stay" in warnings[0]
