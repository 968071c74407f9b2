"""Checkpoints from parts: gathers what the workers wrote and commits it, off the controller's thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from worldline.checkpoint.manifest import CheckpointError, CheckpointManifest
from worldline.checkpoint.save import commit, prune
from worldline.control.signals import Post, SaveEnded
from worldline.storage import Storage
from worldline.worker.orders import CheckpointPart

Key = tuple[int, int]
"""(generation, step)"""


class Saves:
    """Protocol: `offer` every part reported. When the last of a checkpoint is there, and `reached` has told
    that the step log holds its step, it is committed in a thread, and SaveEnded tells how that went. `forget`
    a generation whose parts will not all come; what still comes of it is refused. `rewind` when the line goes
    back to what is durable.

    every_steps: how often workers save. numeric_fingerprint: may be filled later, by the first worker.
    may_write: asked before each commit, whether this driver still has the run.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        every_steps: int,
        keep: int,
        job_digest: str,
        plan_fingerprint: str,
        numeric_fingerprint: Mapping[str, str],
        attempt: int,
        post: Post,
        before_commit: Callable[[], None],
        may_write: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._every_steps = every_steps
        self._keep = keep
        self._job_digest = job_digest
        self._plan_fingerprint = plan_fingerprint
        self._numeric_fingerprint = numeric_fingerprint
        self._attempt = attempt
        self._post = post
        self._before_commit = before_commit
        self._may_write = may_write
        self._warn = warn
        self._parts: dict[Key, dict[int, CheckpointPart]] = {}
        self._whole: dict[int, list[CheckpointPart]] = {}  # step -> parts that wait for the step log
        self._reached = -1
        self._forgotten = 0
        self._committing: set[int] = set()
        self._work: queue.SimpleQueue[list[CheckpointPart] | threading.Event | None] = queue.SimpleQueue()
        self.committed = -1
        """The newest step that is durable."""
        self._thread = threading.Thread(target=self._commit_all, name="commit", daemon=True)
        self._thread.start()

    def offer(self, part: CheckpointPart) -> None:
        if part.generation <= self._forgotten:
            return
        key = (part.generation, part.position.step)
        parts = self._parts.setdefault(key, {})
        parts[part.rank] = part
        if len(parts) == part.parts:
            del self._parts[key]
            self._whole[part.position.step] = [parts[rank] for rank in range(part.parts)]
            self._release()

    def reached(self, step: int) -> None:
        """The step log holds everything up to `step`."""
        self._reached = step
        self._release()

    def pending(self, step: int) -> bool:
        """Whether a checkpoint of `step` is being written or committed."""
        return step in self._committing or step in self._whole or any(key[1] == step for key in self._parts)

    def forget(self, generation: int) -> None:
        """Give up incomplete checkpoints up to this generation."""
        self._forgotten = max(self._forgotten, generation)
        for key in [key for key in self._parts if key[0] <= generation]:
            del self._parts[key]

    def overdue(self, step: int) -> bool:
        """Whether the newest checkpoint that a line at `step` should have is neither there nor on its way."""
        due = step // self._every_steps * self._every_steps
        coming = [*self._committing, *self._whole, *(key[1] for key in self._parts)]
        return due > 0 and all(there < due for there in (self.committed, *coming))

    def settle(self, timeout_s: float) -> bool:
        """Wait for the commits under way; whether they ended in time."""
        done = threading.Event()
        self._work.put(done)
        return done.wait(timeout_s)

    def rewind(self, step: int, durable: bool) -> None:
        """The line goes on after `step`, the newest checkpoint or, if that is not durable, the start."""
        self._whole.clear()
        self._reached = step
        self.committed = step if durable else -1

    def close(self, timeout_s: float) -> None:
        self._work.put(None)
        self._thread.join(timeout_s)

    def _release(self) -> None:
        for step in sorted(step for step in self._whole if step <= self._reached):
            self._committing.add(step)
            self._work.put(self._whole.pop(step))

    def _commit_all(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            began = time.perf_counter()
            step, error = work[0].position.step, ""
            try:
                self._commit(work)
                self.committed = max(self.committed, step)
            except Exception as failure:  # whatever it was: the thread must commit the next
                error = str(failure) or type(failure).__name__
            self._committing.discard(step)
            written = max(part.seconds for part in work)
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
                numeric_fingerprint=dict(self._numeric_fingerprint),
                job_digest=self._job_digest,
                meta=first.meta,
                files={info.file: info.entry for info in infos},
                tensors={name: entry for info in infos for name, entry in info.tensors.items()},
            ),
        )
