from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from worldline.data.manifest import DataError
from worldline.data.plan import Plan
from worldline.data.reader import WindowReader
from worldline.data.scan import scan


def write(path: Path, row_group_size: int = 3, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


def test_finds_a_file_a_glob_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.parquet", "a.parquet", "deep/c.parquet", "_tmp/d.parquet", ".e.parquet", "notes.txt"):
        write(tmp_path / name, x=[1, 2])
    found = {
        path: [entry.path for entry in scan(path).files]
        for path in (
            f"{tmp_path}/a.parquet",
            f"{tmp_path}/*.parquet",
            f"{tmp_path}/[b-z].parquet",
            f"{tmp_path}/d*/*.parquet",
            f"{tmp_path}/**/*.parquet",
            f"{tmp_path}/",
        )
    }
    assert list(found.values()) == [
        ["a.parquet"],
        ["a.parquet", "b.parquet"],
        ["b.parquet"],
        ["deep/c.parquet"],
        ["a.parquet", "b.parquet", "deep/c.parquet"],
        ["a.parquet", "b.parquet", "deep/c.parquet"],
    ]
    monkeypatch.chdir(tmp_path)
    assert scan("a.parquet") == scan(f"{tmp_path}/a.parquet")
    assert scan("*.parquet").root == str(tmp_path)


def test_manifest_says_what_is_in_the_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=pa.array([1, 2, 3, 4], pa.int32()), s=["a", "b", "c", "d"])
    write(tmp_path / "b.parquet", x=pa.array([5], pa.int32()), s=["e"])
    manifest = scan(str(tmp_path))
    assert manifest.columns == (("x", "int32"), ("s", "string"))
    assert [entry.row_groups for entry in manifest.files] == [(3, 1), (1,)]
    assert [entry.size for entry in manifest.files] == [
        (tmp_path / name).stat().st_size for name in ("a.parquet", "b.parquet")
    ]
    assert scan(str(tmp_path), ["s"]).columns == (("s", "string"),)


def test_digest_follows_the_content_not_the_place(tmp_path: Path) -> None:
    write(tmp_path / "one/a.parquet", x=[1, 2])
    write(tmp_path / "two/a.parquet", x=[1, 2])
    write(tmp_path / "three/a.parquet", x=[1, 3])
    digests = [scan(str(tmp_path / name)).digest for name in ("one", "two", "three")]
    assert digests[0] == digests[1] != digests[2]


def test_harmless_drift_is_cast_to_one_schema(tmp_path: Path) -> None:
    """A column all null, an extra column, narrow numbers, dictionaries: one type for all windows."""
    write(tmp_path / "a.parquet", x=pa.nulls(2), n=pa.array([1, 2], pa.int32()), s=["a", "b"])
    write(tmp_path / "b.parquet", x=[0.5, 1.5], n=[3, 4], s=pa.array(["c", "d"]).dictionary_encode())
    write(tmp_path / "c.parquet", x=[2.5, None], n=[5, 6], s=["e", None], extra=["y", "z"])
    manifest = scan(str(tmp_path))
    assert dict(manifest.columns) == {"x": "double", "n": "int64", "s": "string"}
    plan = Plan(manifest, seed=0, num_shards=1, rows_per_shard=1, window_rows=2, shuffle=False)
    blocks = [WindowReader(manifest).read(window) for window in plan.windows(0, 0)]
    assert {(name, str(a.dtype)) for b in blocks for name, a in b.columns.items()} == {
        ("x", "float64"),
        ("n", "int64"),
        ("s", "object"),
    }
    assert [str(v) for b in blocks for v in b.columns["x"].tolist()] == [
        "nan",
        "nan",
        "0.5",
        "1.5",
        "2.5",
        "nan",
    ]
    assert [v for b in blocks for v in b.columns["s"].tolist()] == ["a", "b", "c", "d", "e", None]


def test_conflict_names_file_and_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", id=[1, 2], x=[1.0, 2.0])
    write(tmp_path / "b.parquet", id=["1", "2"], x=[1.0, 2.0])
    with pytest.raises(DataError, match=r"column 'id' is string in b.parquet but int64 in a.parquet"):
        scan(str(tmp_path))
    assert scan(str(tmp_path), ["x"]).num_rows == 4


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_(), pa.null()])
def test_nulls_without_a_value_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    write(tmp_path / "a.parquet", n=[1, 2] if kind != pa.bool_() else [True, False], x=[1.0, None])
    write(tmp_path / "b.parquet", n=pa.array([None, None], kind), x=[1.0, None])
    with pytest.raises(DataError, match=r"column 'n' .* has nulls in b.parquet"):
        scan(str(tmp_path))
    assert scan(str(tmp_path), ["x"]).num_rows == 4


def test_missing_column_suggests_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", label=[1], image=["x"])
    with pytest.raises(DataError, match=r"a.parquet has no column 'lable': did you mean 'label'\?"):
        scan(str(tmp_path), ["image", "lable"])
    with pytest.raises(DataError, match=r"no column 'zzz': it has image, label"):
        scan(str(tmp_path), ["zzz"])
    write(tmp_path / "b.parquet", other=[1])
    with pytest.raises(DataError, match="no column in common"):
        scan(str(tmp_path))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no file or folder at {tmp_path}/nowhere"):
        scan(f"{tmp_path}/nowhere")
    for path in (str(tmp_path), f"{tmp_path}/*.parquet", f"{tmp_path}/no/such/*.parquet"):
        with pytest.raises(DataError, match="no Parquet files match"):
            scan(path)
    write(tmp_path / "a.parquet", x=pa.array([], pa.int64()))
    with pytest.raises(DataError, match="have no rows"):
        scan(str(tmp_path))


def test_not_parquet(tmp_path: Path) -> None:
    write(tmp_path / "good.parquet", x=list(range(100)))
    whole = (tmp_path / "good.parquet").read_bytes()
    bad = tmp_path / "bad.parquet"
    for content, complaint in [
        (b"", "is not a Parquet file"),
        (b"id,x\n1,2\n" * 10, "is not a Parquet file"),
        (whole[:-20], "is not a Parquet file"),
        (b"PAR1" + whole[-20:], "footer is cut off"),
        (whole[:-60] + b"\xff" * 52 + whole[-8:], "cannot read the Parquet footer"),
    ]:
        bad.write_bytes(content)
        with pytest.raises(DataError, match=f"bad.parquet.*{complaint}|{complaint}.*bad.parquet"):
            scan(str(tmp_path))


def test_reads_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        for name in ("a", "b"):
            write(tmp_path / f"{name}.parquet", id=[1, 2])
            client.upload_file(str(tmp_path / f"{name}.parquet"), "bucket", f"rows/{name}.parquet")
        manifest = scan("s3://bucket/rows/*.parquet")
        assert manifest.root == "s3://bucket/rows"
        assert manifest.digest == scan(str(tmp_path)).digest
        plan = Plan(manifest, seed=0, num_shards=1, rows_per_shard=1, window_rows=4, shuffle=False)
        assert WindowReader(manifest).read(plan.window(0, 0, 0)).columns["id"].tolist() == [1, 2, 1, 2]
        with pytest.raises(DataError, match="no file or folder at s3://bucket/nowhere"):
            scan("s3://bucket/nowhere")
    finally:
        server.stop()
