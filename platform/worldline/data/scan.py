"""From a path to a manifest: finds the files, reads their footers, settles one schema."""

from __future__ import annotations

import difflib
import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from worldline.data.manifest import DataError, FileEntry, Manifest
from worldline.data.schema import common_type, plain_type

_MAGIC = b"PAR1"
_THREADS = 8


def scan(path: str, columns: Sequence[str] | None = None) -> Manifest:
    """The manifest of the Parquet files at `path`: a file, a glob (`**` for any depth) or a folder.

    A folder means all *.parquet files below it. Names starting with a dot or underscore are passed over.
    columns: what to read; None: the columns all files have. A file's digest is the SHA-256 of its footer and
    size: the footer holds the place, size, number of values and (nearly always) the extremes of every column
    chunk, so a rewritten file is noticed, but not one whose values were edited in place within those bounds.

    Raises DataError when nothing matches, a file is not Parquet, a column is missing or its types conflict,
    an integer or boolean column has nulls, or there are no rows.
    """
    filesystem, root, names = _find(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        footers = list(pool.map(lambda name: _read_footer(filesystem, root, name), names))
    schema = _one_schema(footers, columns)
    for footer in footers:
        _refuse_nulls(footer, schema)
    entries = (FileEntry(f.name, f.size, f.row_groups, f.digest) for f in footers)
    manifest = Manifest(tuple(entries), tuple((name, str(kind)) for name, kind in schema.items()), root)
    if manifest.num_rows == 0:
        raise DataError(f"the {len(names)} Parquet files at {path} have no rows")
    return manifest


def open_root(root: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a manifest's root, and the root's path in it."""
    if "://" in root:
        filesystem, base = pafs.FileSystem.from_uri(root)
        return filesystem, base
    return pafs.LocalFileSystem(), root


@dataclass(frozen=True)
class _Footer:
    name: str
    size: int
    digest: str
    metadata: pq.FileMetaData
    types: dict[str, pa.DataType]

    @property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups))


def _find(path: str) -> tuple[pafs.FileSystem, str, list[str]]:
    """(file system, root, sorted paths relative to the root)."""
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
    parts = path.rstrip("/").split("/")
    glob_at = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    try:
        if glob_at is not None:
            root, pattern = "/".join(parts[:glob_at]) or "/", parts[glob_at:]
        else:
            filesystem, base = open_root("/".join(parts))
            match filesystem.get_file_info(base).type:
                case pafs.FileType.File:
                    return filesystem, "/".join(parts[:-1]) or "/", [parts[-1]]
                case pafs.FileType.NotFound:
                    raise DataError(f"no file or folder at {path}")
            root, pattern = "/".join(parts), ["**", "*.parquet"]
        filesystem, base = open_root(root)
        deep = len(pattern) > 1
        listing = filesystem.get_file_info(pafs.FileSelector(base, allow_not_found=True, recursive=deep))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot list {path}: {error}") from error
    names = [info.path[len(base) :].lstrip("/") for info in listing if info.type == pafs.FileType.File]
    names = sorted(name for name in names if _visible(name) and _matches(name.split("/"), pattern))
    if not names:
        raise DataError(f"no Parquet files match {'/'.join([root.rstrip('/'), *pattern])}")
    return filesystem, root, names


def _visible(name: str) -> bool:
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _read_footer(filesystem: pafs.FileSystem, root: str, name: str) -> _Footer:
    where = f"{root.rstrip('/')}/{name}"
    try:
        with filesystem.open_input_file(f"{open_root(root)[1].rstrip('/')}/{name}") as file:
            size = file.size()
            tail = file.read_at(8, max(0, size - 8))
            if size < 12 or tail[4:] != _MAGIC:
                raise DataError(f"{where} is not a Parquet file")
            length = struct.unpack("<I", tail[:4])[0] + 8
            if length + 4 > size:
                raise DataError(f"{where} is not a whole Parquet file: its footer is cut off")
            footer = file.read_at(length, size - length)
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read the Parquet footer of {where}: {error}") from error
    digest = hashlib.sha256(footer + size.to_bytes(8, "little")).hexdigest()
    return _Footer(name, size, digest, metadata, {field.name: plain_type(field.type) for field in schema})


def _one_schema(footers: Sequence[_Footer], columns: Sequence[str] | None) -> dict[str, pa.DataType]:
    if columns is None:
        columns = [name for name in footers[0].types if all(name in f.types for f in footers)]
        if not columns:
            raise DataError("the files have no column in common: name the columns under data.*.columns")
    schema: dict[str, pa.DataType] = {}
    for name in columns:
        for footer in footers:
            if name not in footer.types:
                raise DataError(f"{footer.name} has no column {name!r}{_hint(name, footer.types)}")
        kind, typed_by = footers[0].types[name], footers[0].name
        for footer in footers[1:]:
            found = footer.types[name]
            merged = common_type(kind, found)
            if merged is None:
                raise DataError(
                    f"column {name!r} is {found} in {footer.name} but {kind} in {typed_by}: "
                    "rewrite one of them, or leave the column out under data.*.columns"
                )
            if merged != kind:
                kind, typed_by = merged, footer.name
        schema[name] = kind
    return schema


def _hint(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else f": it has {', '.join(sorted(known)[:20])}"


def _refuse_nulls(footer: _Footer, schema: dict[str, pa.DataType]) -> None:
    """Integers and booleans have no value for null; say so before the first step where the footer knows."""
    exact = {n for n, k in schema.items() if pa.types.is_integer(k) or pa.types.is_boolean(k)}
    if not exact or footer.metadata.num_rows == 0:
        return
    for name in exact:
        if pa.types.is_null(footer.types[name]):
            raise DataError(no_nulls_message(name, str(schema[name]), footer.name))
    for group in range(footer.metadata.num_row_groups):
        row_group = footer.metadata.row_group(group)
        for i in range(row_group.num_columns):
            column = row_group.column(i)
            statistics = column.statistics if column.path_in_schema in exact else None
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                name = column.path_in_schema
                raise DataError(
                    no_nulls_message(name, str(schema[name]), f"{footer.name}, row group {group}")
                )


def no_nulls_message(column: str, kind: str, where: str) -> str:
    return (
        f"column {column!r} ({kind}) has nulls in {where}: fill them, store the column as float, "
        "or leave it out under data.*.columns"
    )
