"""Checkpoints from parts: gathers what the workers wrote and commits it, off the controller's thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from worldline.checkpoint.manifest import CheckpointError, CheckpointManifest
from worldline.checkpoint.save import commit, prune
from worldline.control.signals import Post, SaveEnded
from worldline.storage import Storage, StorageError
from worldline.worker.orders import CheckpointPart

Key = tuple[int, int]
"""(generation, step)"""


class Saves:
    """Protocol: `offer` every part reported; when the last of a checkpoint is there it is committed in a
    thread, and
    SaveEnded tells how that went. `forget` the parts of a generation that broke before all were written.

    may_write: asked before each commit, whether this driver still has the run.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int,
        job_digest: str,
        plan_fingerprint: str,
        attempt: int,
        post: Post,
        before_commit: Callable[[], None],
        may_write: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._keep = keep
        self._job_digest = job_digest
        self._plan_fingerprint = plan_fingerprint
        self._attempt = attempt
        self._post = post
        self._before_commit = before_commit
        self._may_write = may_write
        self._warn = warn
        self._parts: dict[Key, dict[int, CheckpointPart]] = {}
        self._committing: set[int] = set()
        self._complete: queue.SimpleQueue[list[CheckpointPart] | None] = queue.SimpleQueue()
        self.numeric_fingerprint: dict[str, str] = {}
        self.committed = -1
        """The newest step that is durable."""
        self._thread = threading.Thread(target=self._commit_all, name="commit", daemon=True)
        self._thread.start()

    def offer(self, part: CheckpointPart) -> None:
        key = (part.generation, part.position.step)
        parts = self._parts.setdefault(key, {})
        parts[part.rank] = part
        if len(parts) == part.parts:
            del self._parts[key]
            self._committing.add(part.position.step)
            self._complete.put([parts[rank] for rank in range(part.parts)])

    def pending(self, step: int) -> bool:
        """Whether a checkpoint of `step` is being written or committed."""
        return step in self._committing or any(key[1] == step for key in self._parts)

    def forget(self, generation: int) -> bool:
        """Drop incomplete checkpoints up to this generation; whether there was one."""
        stale = [key for key in self._parts if key[0] <= generation]
        for key in stale:
            del self._parts[key]
        return bool(stale)

    def close(self, timeout_s: float) -> None:
        self._complete.put(None)
        self._thread.join(timeout_s)

    def _commit_all(self) -> None:
        while (parts := self._complete.get()) is not None:
            began = time.perf_counter()
            step = parts[0].position.step
            error = ""
            try:
                self._commit(parts)
                self.committed = max(self.committed, step)
            except (CheckpointError, StorageError) as failure:
                error = str(failure)
            self._committing.discard(step)
            written = max(part.seconds for part in parts)
            self._post(SaveEnded(step, written + time.perf_counter() - began, error))
            if not error:
                prune(self._storage, self._keep, self._warn)

    def _commit(self, parts: list[CheckpointPart]) -> None:
        failed = [part for part in parts if part.part is None]
        if failed:
            raise CheckpointError("; ".join(f"rank {part.rank}: {part.error}" for part in failed))
        if not self._may_write():
            raise CheckpointError("another driver has taken the run")
        digests = {part.state_digest for part in parts}
        if len(digests) > 1:
            raise CheckpointError("the members' states differ: " + ", ".join(sorted(digests)))
        self._before_commit()
        first = parts[0]
        infos = [part.part for part in parts if part.part is not None]
        commit(
            self._storage,
            CheckpointManifest(
                step=first.position.step,
                evaluated=first.position.evaluated,
                attempt=self._attempt,
                generation=first.generation,
                state_digest=first.state_digest,
                plan_fingerprint=self._plan_fingerprint,
                numeric_fingerprint=self.numeric_fingerprint,
                job_digest=self._job_digest,
                meta=first.meta,
                files={info.file: info.entry for info in infos},
                tensors={name: entry for info in infos for name, entry in info.tensors.items()},
            ),
        )
