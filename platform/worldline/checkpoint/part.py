"""One part of a checkpoint: a safetensors file, written and read in one pass together with its checksum.

The format is eight bytes of header length, a JSON header, the tensors' bytes. Any safetensors reader takes
these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worldline.checkpoint.manifest import CheckpointError, FileEntry, TensorEntry
from worldline.storage import Storage
from worldline.tensors import tensor_bytes

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class PartInfo:
    """A part that is written: what the manifest needs to know of it."""

    file: str
    entry: FileEntry
    tensors: dict[str, TensorEntry]


def write_part(storage: Storage, directory: str, name: str, tensors: Mapping[str, torch.Tensor]) -> PartInfo:
    """Write `tensors`, which must not change meanwhile, to the file `directory/name`.

    Raises StorageError, and CheckpointError for what cannot be stored.
    """
    entries = _layout(name, tensors)
    header = _header(entries)
    sha = hashlib.sha256(header)
    size = len(header) + max((entry.offsets[1] for entry in entries.values()), default=0)

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(header)
            for tensor_name in entries:
                data = tensor_bytes(tensors[tensor_name])
                sha.update(data)
                file.write(data)

    key = f"{directory}/{name}"
    storage.put_file(key, write)
    if (found := storage.size(key)) != size:
        raise CheckpointError(f"{key} has {found} bytes after writing {size}; the storage lost some")
    return PartInfo(name, FileEntry(size=size, sha256=sha.hexdigest()), entries)


def read_part(path: Path, file: FileEntry, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """The tensors of a part, on the host. Raises CheckpointError unless every byte is as the manifest
    says."""
    tensors = {}
    with open(path, "rb") as source:
        length = source.read(8)
        header = source.read(min(int.from_bytes(length, "little"), file.size))
        if not _describes(header, entries):
            raise CheckpointError("holds other tensors than the manifest says")
        sha = hashlib.sha256(length + header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offsets):
            tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
            data = tensor_bytes(tensors[name])
            source.readinto(data)
            sha.update(data)
        if source.read(1) or sha.hexdigest() != file.sha256:
            raise CheckpointError("content does not match its checksum")
    return tensors


def check_part(path: Path, file: FileEntry) -> None:
    """Raises CheckpointError unless the file is, byte for byte, the one that was written."""
    if (size := path.stat().st_size) != file.size:
        raise CheckpointError(f"has {size} bytes instead of {file.size}")
    with open(path, "rb") as source:
        if hashlib.file_digest(source, "sha256").hexdigest() != file.sha256:
            raise CheckpointError("content does not match its checksum")


def _layout(file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """The widest elements first, so that every tensor is aligned for readers that map the file into
    memory."""
    entries = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"cannot store {name}: safetensors knows no {tensor.dtype}")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(
            file=file, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), offsets=(offset, end)
        )
        offset = end
    return entries


def _header(entries: Mapping[str, TensorEntry]) -> bytes:
    text = json.dumps({"__metadata__": {"format": "pt"}, **_described(entries)}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _described(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": list(entry.offsets)}
        for name, entry in entries.items()
    }


def _describes(header: bytes, entries: Mapping[str, TensorEntry]) -> bool:
    try:
        tree = json.loads(header)
    except ValueError:
        return False
    known = all(entry.dtype in _DTYPES for entry in entries.values())
    return known and {**tree, "__metadata__": None} == {**_described(entries), "__metadata__": None}
