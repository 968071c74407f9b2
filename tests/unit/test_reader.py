import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from worldline.data.block import ROW_ID, Block, Columns, decode, encode, plain_array
from worldline.data.manifest import DataError, Manifest
from worldline.data.plan import Plan
from worldline.data.reader import LocalSource, WindowReader, check_rows
from worldline.data.scan import scan
from worldline.data.transform import load_transform, transform_digest

SIZES = (7, 1, 13, 2, 8)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """31 rows in five uneven files; every value says which row it belongs to."""
    first = 0
    for i, size in enumerate(SIZES):
        ids = np.arange(first, first + size)
        table = {
            "id": ids,
            "name": [f"row {row}" for row in ids],
            "pair": [[float(row), -float(row)] for row in ids],
            "image": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4).astype(np.uint8)), 4),
        }
        pq.write_table(pa.table(table), tmp_path / f"part-{i}.parquet", row_group_size=5)
        first += size
    return scan(str(tmp_path))


def plan(manifest: Manifest, **changes: Any) -> Plan:
    given: dict[str, Any] = {"seed": 5, "num_shards": 4, "rows_per_shard": 2, "window_rows": 6}
    return Plan(manifest, **(given | changes))


def test_rows_carry_their_ids_in_the_planned_order(manifest: Manifest) -> None:
    reader, p = WindowReader(manifest, cache_bytes=0), plan(manifest)
    seen = []
    for window in (w for shard in range(4) for w in p.windows(1, shard)):
        block = reader.read(window)
        check_rows(block, window)
        assert block.columns["id"].tolist() == block.row_ids.tolist()
        assert block.columns["name"].tolist() == [f"row {row}" for row in block.row_ids]
        assert block.columns["pair"].shape == (window.num_rows, 2)
        assert block.columns["pair"][:, 1].tolist() == [-row for row in block.row_ids]
        assert block.columns["image"].dtype == np.uint8
        assert block.columns["image"][:, 3].tolist() == block.row_ids.tolist()
        seen += block.row_ids.tolist()
    assert sorted(seen) == list(range(31))


def test_columns_are_chosen(manifest: Manifest) -> None:
    block = WindowReader(manifest, ["pair", "id"]).read(plan(manifest).window(0, 0, 0))
    assert list(block.columns) == ["pair", "id"]


def test_cached_groups_give_the_same_rows(manifest: Manifest) -> None:
    p = plan(manifest, num_shards=1, rows_per_shard=1, window_rows=2)
    kept, dropped = WindowReader(manifest), WindowReader(manifest, cache_bytes=0)
    for window in [*p.windows(0, 0), *reversed(list(p.windows(0, 0)))]:
        assert encode(kept.read(window)).equals(encode(dropped.read(window)))
    assert len(kept._groups) == 9
    assert len(dropped._groups) == 1


def test_check_rows_sees_wrong_rows(manifest: Manifest) -> None:
    p = plan(manifest)
    block = WindowReader(manifest).read(p.window(0, 0, 0))
    with pytest.raises(DataError, match=r"WindowKey\(epoch=1, shard=0, window=0\)"):
        check_rows(block, p.window(1, 0, 0))


def test_a_file_that_changed_is_named(manifest: Manifest, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "part-2.parquet")
    window = plan(manifest, num_shards=1, window_rows=31).window(0, 0, 0)
    with pytest.raises(DataError, match=r"part-2.parquet has changed .* and 1 rows, not \d+ and 13"):
        WindowReader(manifest).read(window)


def test_unreadable_file_and_row_group_are_named(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "part-2.parquet"
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    p = plan(manifest, num_shards=1, rows_per_shard=1, window_rows=31, shuffle=False)
    with pytest.raises(DataError, match=r"cannot read .*part-2.parquet, row group 0"):
        WindowReader(manifest).read(p.window(0, 0, 0))
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*part-2.parquet, row group 0"):
        WindowReader(manifest).read(p.window(0, 0, 0))


def test_what_goes_through_arrow_comes_back() -> None:
    rng = np.random.default_rng(0)
    nan = np.array([0x7FF8000000000001, 0x3FF0000000000000, 0xFFF8000000000000], np.uint64).view(np.float64)
    columns: Columns = {
        "bool": np.array([True, False, True]),
        "float16": rng.normal(size=3).astype(np.float16),
        "nan bits": nan,
        "uint8 image": rng.integers(0, 255, (3, 2, 4, 5)).astype(np.uint8),
        "strided": rng.normal(size=(5, 3)).T,
        "time": np.array(["2020-01-01", "NaT", "2021-05-05"], "datetime64[s]"),
        "text": np.array(["a", None, "c"], dtype=object),
        "bytes": np.array([b"a", b"\x00", b""], dtype=object),
    }
    block = decode(encode(Block(columns, np.arange(3))))
    assert list(block.columns) == list(columns)
    for name, before in columns.items():
        after = block.columns[name]
        assert (after.dtype, after.shape) == (before.dtype, before.shape), name
        assert before.tolist() == after.tolist() or before.tobytes() == after.tobytes(), name
    assert block.columns["nan bits"].tobytes() == nan.tobytes()
    ragged = np.empty(3, dtype=object)
    ragged[:] = [np.arange(2), np.arange(0), np.arange(3)]
    again = decode(encode(Block({"r": ragged}, np.arange(3)))).columns["r"]
    assert [row.tolist() for row in again] == [[0, 1], [], [0, 1, 2]]


READ_ALL = """
import sys
from worldline.data.plan import Plan
from worldline.data.reader import WindowReader
from worldline.data.scan import scan
from worldline.data.transform import load_transform
manifest = scan(sys.argv[1])
plan = Plan(manifest, seed=5, num_shards=4, rows_per_shard=2, window_rows=6)
reader = WindowReader(manifest, cache_bytes=0, transform=load_transform("twice:twice"))
rows = [reader.read(window).num_rows for shard in range(4) for window in plan.windows(0, shard)]
assert sum(rows) == manifest.num_rows
print("pandas" in sys.modules)
"""


def test_pandas_is_not_imported_to_read_numbers(tmp_path: Path) -> None:
    """Arrow imports it, and takes its time, for much that does not need it."""
    ids = np.arange(31)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4).astype(np.uint8)), 4)
    pq.write_table(pa.table({"id": ids, "x": ids / 2, "image": lists}), tmp_path / "part.parquet")
    (tmp_path / "twice.py").write_text("def twice(columns):\n    return {'id': columns['id'] * 2}\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
def test_plain_numbers_are_stored_as_arrow_stores_them(kind: str) -> None:
    bits = np.random.default_rng(1).integers(0, 256, size=64 * np.dtype(kind).itemsize, dtype=np.uint8)
    for values in (bits.view(kind), bits.view(kind)[::3], bits.view(kind)[:0]):  # NaN among them
        array = plain_array(values)
        array.validate(full=True)
        assert array.type == pa.array(values, from_pandas=False).type
        assert array.null_count == 0
        assert array.to_numpy().tobytes() == values.tobytes()
        part = decode(pa.table({"x": array[1:], ROW_ID: np.arange(len(array[1:]))})).columns["x"]
        assert (part.dtype, part.tobytes()) == (values.dtype, values[1:].tobytes())


def test_integer_nulls_are_refused_when_read() -> None:
    table = pa.table({"n": [[1, None]], ROW_ID: [0]})
    with pytest.raises(DataError, match=r"column 'n' .* has nulls"):
        decode(table)


# Transforms


def halve(columns: Columns) -> Columns:
    return {"half": columns["id"] / 2, "text": np.char.add(columns["name"].astype(str), "!")}


def drop_a_row(columns: Columns) -> Columns:
    return {"id": columns["id"][1:]}


def give_a_list(columns: Columns) -> Columns:
    return {"id": columns["id"].tolist()}


def give_nothing(columns: Columns) -> None:
    return None


def give_complex(columns: Columns) -> Columns:
    return {"z": columns["id"] * 1j}


def write_in_place(columns: Columns) -> Columns:
    columns["id"] += 1
    return columns


def fail(columns: Columns) -> Columns:
    raise KeyError("picture")


def test_transform_is_applied(manifest: Manifest) -> None:
    p = plan(manifest)
    block = LocalSource(WindowReader(manifest, transform=halve), p).fetch(p.window(0, 1, 0).key, 1)
    assert list(block.columns) == ["half", "text"]
    assert block.columns["half"].tolist() == [row / 2 for row in block.row_ids]
    assert block.columns["text"].tolist() == [f"row {row}!" for row in block.row_ids]


@pytest.mark.parametrize(
    ("transform", "complaint"),
    [
        (drop_a_row, "was given 6 rows and returned 5 in 'id': it must turn each row into one row"),
        (give_a_list, "must return NumPy arrays; 'id' is list"),
        (give_nothing, "must return a dict of arrays, not NoneType"),
        (give_complex, "column 'z' of type complex128 cannot be stored"),
        (write_in_place, "raised ValueError: .*read-only"),
        (fail, "raised KeyError: 'picture'"),
    ],
)
def test_transform_that_breaks_the_contract_is_named(
    manifest: Manifest, transform: Any, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        WindowReader(manifest, transform=transform).read(plan(manifest).window(0, 0, 0))
    assert transform is give_complex or f":{transform.__name__} " in str(caught.value)


def test_transforms_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wl_encode.py").write_text("NUMBER = 1\ndef encode(columns):\n    return columns\n")
    (tmp_path / "wl_broken.py").write_text("import wl_not_there\n")
    assert load_transform("wl_encode:encode")({"x": np.arange(2)})["x"].tolist() == [0, 1]
    with pytest.raises(DataError, match="'wl_encode' has no function 'encod'"):
        load_transform("wl_encode:encod")
    with pytest.raises(DataError, match="'wl_encode:NUMBER' is not a function"):
        load_transform("wl_encode:NUMBER")
    with pytest.raises(DataError, match=r"No module named 'wl_nowhere': is its folder"):
        load_transform("wl_nowhere:encode")
    with pytest.raises(DataError, match=r"No module named 'wl_not_there'$"):
        load_transform("wl_broken:encode")


SOURCE = """
SIZE = 3
def helper(x):
    return x * SIZE
def unrelated():
    return 1
def encode(columns):
    return {k: helper(v) for k, v in columns.items()}
"""


def test_transform_digest_follows_what_the_transform_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    sources = [
        SOURCE,
        SOURCE.replace("return 1", "return 2"),  # not used
        SOURCE.replace("SIZE = 3", "SIZE = 4"),
        SOURCE.replace("x * SIZE", "x + SIZE"),
        SOURCE.replace("k: helper", "k + k: helper"),
    ]
    digests: list[str] = []
    for i, source in enumerate(sources):
        (tmp_path / f"wl_digest{i}.py").write_text(source)
        digests.append(transform_digest(load_transform(f"wl_digest{i}:encode")))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
