"""This worker's parts of checkpoints, and the digests that stand in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from worldline.checkpoint.manifest import part_name, partition
from worldline.checkpoint.save import PartResult, PartWriter
from worldline.storage import Storage
from worldline.worker.mailbox import Mailbox
from worldline.worker.orders import CheckpointPart
from worldline.worker.state import TrainState, digest, snapshot
from worldline.world import Position


class Parts:
    """Writes them behind the training.

    Protocol: `write` copies and returns; how it ended is posted as a CheckpointPart, in the order of the
    calls. `digest(step)` is taken once a step; after another state was loaded, `forget()` comes first.
    """

    def __init__(self, state: TrainState, storage: Storage, attempt: int, mailbox: Mailbox) -> None:
        self._state = state
        self._attempt = attempt
        self._mailbox = mailbox
        self._digested: tuple[int, str] | None = None
        self._pending: deque[CheckpointPart] = deque()  # the writer answers in the order of submission
        self._writer = PartWriter(storage, self._written)

    def write(self, position: Position, generation: int, part: int, parts: int) -> None:
        """Part number `part` of `parts` of a checkpoint of the state, which is at `position`."""
        tensors, meta = self._state.tensors(), self._state.meta()
        names = partition({name: t.numel() * t.element_size() for name, t in tensors.items()}, parts)[part]
        copies = snapshot({name: tensors[name] for name in names})
        self._pending.append(
            CheckpointPart(
                generation=generation,
                rank=part,
                parts=parts,
                position=position,
                state_digest=self._digest(position.step, tensors, meta),
                meta=meta if part == 0 else {},
                part=None,
            )
        )
        self._writer.submit(position.step, part_name(self._attempt, generation, part), copies)

    def digest(self, step: int) -> str:
        """Of the state, which is that after `step`."""
        return self._digest(step, self._state.tensors(), self._state.meta())

    def forget(self) -> None:
        """The state is not what it was when a digest was taken."""
        self._digested = None

    def close(self, timeout_s: float) -> bool:
        """Finish what is being written; whether that was done in time."""
        return self._writer.close(timeout_s)

    def _digest(self, step: int, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> str:
        if self._digested is None or self._digested[0] != step:
            self._digested = step, digest(tensors, meta)
        return self._digested[1]

    def _written(self, result: PartResult) -> None:
        pending = self._pending.popleft()
        self._mailbox.post(
            replace(pending, part=result.info, error=result.error or "", seconds=result.seconds)
        )
