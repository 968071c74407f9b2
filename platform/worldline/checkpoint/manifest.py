"""What a checkpoint says about itself, and the names of its files. Pure.

A checkpoint is a folder `checkpoints/step-00000050/` of part files and `manifest.json`. The manifest is
written last and makes it one; it lists every file with size and checksum and every tensor with its place, so
a reader needs to know nothing of the world that wrote it. Names of parts carry attempt and generation: two
saves of a step never mix.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worldline.world import Position

FOLDER = "checkpoints/"
MANIFEST = "manifest.json"
_STEP = re.compile(r"checkpoints/step-(\d+)/([^/]+)")
_PART = re.compile(r"a(\d+)-g(\d+)-r\d+\.safetensors")

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CheckpointError(Exception):
    """A checkpoint that cannot be written, is damaged, or is none of ours."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Entry):
    size: Count
    sha256: Digest


class TensorEntry(_Entry):
    """file: the part that holds the tensor. dtype: as safetensors calls it. offsets: first byte and the one
    after the last, counted from the end of the file's header."""

    file: str
    dtype: str
    shape: Annotated[tuple[Count, ...], Field(strict=False)]
    offsets: Annotated[tuple[Count, Count], Field(strict=False)]


class CheckpointManifest(_Entry):
    """step, evaluated: the position of the state. meta: what is not tensors. The rest says what it belongs
    to."""

    format: Literal["worldline-checkpoint-1"] = "worldline-checkpoint-1"
    step: Count
    evaluated: bool
    attempt: Count
    generation: Count
    state_digest: Digest
    plan_fingerprint: str
    numeric_fingerprint: dict[str, Any]
    job_digest: str
    meta: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def position(self) -> Position:
        return Position(self.step, self.evaluated)

    @property
    def issue(self) -> tuple[int, int]:
        """Attempt and generation: of two saves of one step the later is the truth."""
        return self.attempt, self.generation

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointManifest:
        for name in self.files:
            if part_issue(name) != self.issue:
                raise ValueError(
                    f"file {name!r} is no part of attempt {self.attempt}, generation {self.generation}"
                )
        for name, tensor in self.tensors.items():
            if tensor.file not in self.files:
                raise ValueError(f"tensor {name} is in {tensor.file!r}, which is not among the files")
        return self

    def to_json(self) -> str:
        # Python's json, not pydantic's: it keeps every float and int exactly.
        tree = self.model_dump()
        return json.dumps(tree | {"checksum": _checksum(tree)}, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> CheckpointManifest:
        """Raises CheckpointError that says what is wrong."""
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST} is no JSON: {error}") from None
        if not isinstance(tree, dict) or not str(tree.get("format")).startswith("worldline-checkpoint-"):
            raise CheckpointError(f"{MANIFEST} is not that of a Worldline checkpoint")
        if tree.pop("checksum", None) != _checksum(tree):
            raise CheckpointError(f"{MANIFEST} does not match its own checksum")
        try:
            return CheckpointManifest.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{MANIFEST}: {place + ': ' if place else ''}{first['msg']}") from None


def _checksum(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def directory(step: int) -> str:
    return f"{FOLDER}step-{step:08d}"


def part_name(attempt: int, generation: int, rank: int) -> str:
    return f"a{attempt}-g{generation}-r{rank}.safetensors"


def part_issue(name: str) -> tuple[int, int] | None:
    """Attempt and generation of the save a file is part of; None if it is no part."""
    match = _PART.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def files_by_step(keys: Iterable[str]) -> dict[int, list[str]]:
    """step -> names of the manifest and the parts there are in its folder, whoever wrote them."""
    steps: dict[int, list[str]] = {}
    for key in keys:
        match = _STEP.fullmatch(key)
        if match is None:
            continue
        step, name = int(match[1]), match[2]
        if key == f"{directory(step)}/{name}" and (name == MANIFEST or part_issue(name)):
            steps.setdefault(step, []).append(name)
    return steps


def partition(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Share out tensors among `parts` writers, about the same number of bytes to each.

    The largest first, each to the part that has least so far. The order of `sizes` does not matter.
    """
    loads = [(0, part) for part in range(parts)]
    shares: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, part = heapq.heappop(loads)
        shares[part].append(name)
        heapq.heappush(loads, (load + sizes[name], part))
    return [sorted(share) for share in shares]
