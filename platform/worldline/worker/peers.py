"""Collectives of the task's own, after a step: checked before any value is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from worldline.collective.group import ASIDE, Abandoned, CollectiveFailed, Group
from worldline.health import words
from worldline.task import Task
from worldline.tensors import dtype_name

HEADER_BYTES = 1024


class CollectiveMismatch(RuntimeError):
    """The workers called different collectives at the same place; raised on all of them alike."""


@dataclass(frozen=True)
class Call:
    """What a worker called. number: counts its calls of a generation from 1."""

    step: int
    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"gather({self.name!r}, {self.dtype}{list(self.shape)}), call {self.number} in the generation"

    def to_bytes(self) -> bytes:
        """Raises ValueError if it does not fit into a header."""
        content = json.dumps(asdict(self)).encode()
        if len(content) > HEADER_BYTES:
            raise ValueError(
                f"gather: the name and shape take {len(content)} bytes, {HEADER_BYTES} are the most; "
                "use a shorter name"
            )
        return content.ljust(HEADER_BYTES)

    @staticmethod
    def from_bytes(header: bytes) -> Call:
        fields = json.loads(header)
        return Call(**{**fields, "shape": tuple(fields["shape"])})


class GroupPeers:
    """`task.Peers` over a generation's group, None in a world of one.

    Protocol: `open(step)`, then the task's calls, then `close()`, which raises what broke the group, if
    anything did: a task may have caught it, but nothing that is left can be done in this generation.
    """

    def __init__(self, group: Group | None, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._step: int | None = None
        self._calls = 0
        self._broken: CollectiveFailed | Abandoned | None = None

    def open(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        self._step = None
        if self._broken is not None:
            raise self._broken

    def gather(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._step is None:
            raise RuntimeError("peers can be used in after_step only, not once it has returned")
        if self._broken is not None:
            raise self._broken
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise TypeError(f"gather({name!r}): expected a dense tensor, got {type(tensor).__name__}")
        self._calls += 1
        call = Call(self._step, self._calls, name, dtype_name(tensor.dtype), tuple(tensor.shape))
        header = call.to_bytes()
        # Bytes, since every dtype has them and no backend knows all dtypes.
        own = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if self._group is None:
            return [own.clone()]
        label = f"gather {name!r} after step {self._step}"
        try:
            self._group.connect_aside(label)
            self._check(self._exchange(self._group, _as_bytes(header), label))
            if not own.numel():
                return [own.clone() for _ in range(self.size)]
            parts = self._exchange(self._group, own.view(-1).view(torch.uint8), label)
        except (CollectiveFailed, Abandoned) as error:
            self._broken = error
            raise
        return [part.view(own.dtype).view(own.shape).to(tensor.device) for part in parts]

    def _check(self, headers: Sequence[torch.Tensor]) -> None:
        called: dict[Call, list[int]] = {}
        for rank, header in enumerate(headers):
            called.setdefault(Call.from_bytes(bytes(header.cpu().numpy())), []).append(rank)
        if len(called) > 1:
            parts = (f"{words.ranks(ranks)}: {call}" for call, ranks in called.items())
            raise CollectiveMismatch(
                f"the workers called different collectives after step {self._step}: {'; '.join(parts)}. "
                "All must call the same ones, in the same order, with tensors of the same dtype and shape"
            )

    def _exchange(self, group: Group, mine: torch.Tensor, label: str) -> list[torch.Tensor]:
        """These bytes of every rank, as many from each."""
        length = len(mine)
        incoming = torch.empty(self.size * length, dtype=torch.uint8, device=group.device)
        outgoing = mine.to(group.device).repeat(self.size)
        cuts = [length] * self.size
        group.wait(group.all_to_all(incoming, outgoing, cuts, cuts, lane=ASIDE, label=label))
        return list(torch.split(incoming, length))


class AfterStep:
    """The task's `after_step`, if it has one.

    Protocol: `join` once a generation; then, where `wanted`, `call(step)` after each step. It raises
    CollectiveFailed or Abandoned where the group broke meanwhile, whatever the task made of that; else what
    the task raises.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.wanted = type(task).after_step is not Task.after_step

    def join(self, group: Group | None, rank: int, size: int) -> None:
        self._peers = GroupPeers(group, rank, size)

    def call(self, step: int) -> None:
        self._peers.open(step)
        try:
            self._task.after_step(step, self._peers)
        finally:
            self._peers.close()


def _as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
