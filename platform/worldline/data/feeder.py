"""One Ray Data pipeline a run: the feeder holds the next windows, workers ask for theirs."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worldline.data.block import Block, decode
from worldline.data.plan import Need, Plan, Window, WindowKey
from worldline.data.reader import WindowReader

logger = logging.getLogger(__name__)

MAX_BYTES = 512 * 2**20
# Windows in one execution of the pipeline, which bounds what Ray Data keeps about tasks to come.
STRETCH = 512
# Failures of the pipeline in a row, without a window between, after which workers read for themselves.
MAX_FAILURES = 3

# How long a worker waits for a feeder that let it wait in vain before.
SLOW_PATIENCE_S = 0.5

# A Ray actor handle of `Feeder`.
FeederHandle = Any

_END = Need(sys.maxsize, 0, 0)


@dataclass
class _Held:
    ref: ray.ObjectRef[pa.Table]
    num_bytes: int
    given: bool = False


class Feeder:
    """Runs the pipeline from a position on and holds the windows that are needed next. A Ray actor.

    Protocol: workers call `window(key)` for the windows of their shards, in whatever order their steps need
    them; the feeder knows neither workers nor steps. A window stays after it was given, as long as there is
    room, since a shard may move to another worker. None as an answer means: not here and not to come, make it
    yourself. So nothing the feeder forgets, loses or gets wrong can change or lose a row; it costs the
    reading of one window. When many windows in a row are asked for that lie behind, the run has been set
    back: the pipeline begins again there.

    The pipeline is pulled while there is room within `max_bytes`; windows already given make room first. A
    worker that waits for a window still to come is served even when those before it, which nobody took, fill
    the room.
    """

    def __init__(
        self,
        plan: Plan,
        columns: Sequence[str] | None,
        last_step: int,
        cpus: float,
        max_bytes: int,
        import_paths: Sequence[str],
    ) -> None:
        # Here, because every worker imports this module, and only this actor needs the weight of Ray Data.
        from worldline.data.datasource import execute

        self._execute = execute
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        # It warns that there is no progress bar.
        logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
        self._plan = plan
        self._columns = columns
        self._last_step = last_step
        self._cpus = cpus
        self._max_bytes = max_bytes
        self._import_paths = import_paths
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        # Windows in the order of need.
        self._held: dict[Need, _Held] = {}
        self._waiting: list[Need] = []
        # The next window to come: those before it have come or were passed over. None: nobody has said.
        self._cursor: Need | None = None
        self._seek: Need | None = None
        self._num_behind = 0
        self._failure: str | None = None
        self._counts = {"given": 0, "missed": 0, "restarts": 0, "failures": 0}
        threading.Thread(target=self._produce, name="worldline-feeder", daemon=True).start()

    def begin(self, step: int) -> None:
        """Start with the windows that `step` needs.

        Called once, after the start. A feeder that died and was started again by Ray does not know where the
        run is; the first worker that asks tells it.
        """
        with self._changed:
            if self._cursor is None:
                self._cursor = self._plan.first_need(step)
                self._changed.notify_all()

    def window(self, key: tuple[int, int, int], timeout_s: float) -> list[ray.ObjectRef[pa.Table]] | None:
        """The window's table, in a list so that the reference and not the rows is passed on; or None."""
        need = Need.of(WindowKey(*key))
        with self._changed:
            if self._cursor is None:
                self._cursor = Need(need.epoch, need.window, 0)
            self._waiting.append(need)
            self._changed.notify_all()
            self._changed.wait_for(lambda: need in self._held or self._cannot_come(need), timeout_s)
            self._waiting.remove(need)
            held = self._held.get(need)
            if held is None:
                self._miss(need)
                return None
            held.given = True
            self._num_behind = 0
            self._counts["given"] += 1
            self._changed.notify_all()
            return [held.ref]

    def stats(self) -> dict[str, Any]:
        """given, missed: windows asked for and handed out, or not. restarts: times the run was set back.
        failures: of the pipeline; failure: the last one, if the pipeline was given up. held, held_bytes."""
        with self._changed:
            held = {"held": len(self._held), "held_bytes": self._held_bytes()}
            return self._counts | held | {"failure": self._failure}

    # Asking, with the lock held

    def _cannot_come(self, need: Need) -> bool:
        return self._failure is not None or (self._cursor is not None and need < self._cursor)

    def _miss(self, need: Need) -> None:
        self._counts["missed"] += 1
        if self._failure is None and self._cursor is not None and need < self._cursor:
            # A resize or a failed window costs a few misses; so many in a row are a run set back.
            self._num_behind += 1
            if self._num_behind > 2 * self._plan.num_shards:
                self._num_behind = 0
                self._seek = need
                self._changed.notify_all()

    # Producing, in the one thread

    def _produce(self) -> None:
        failures = 0
        while failures < MAX_FAILURES:
            pipeline = self._pipeline(self._begin())
            try:
                while self._wait_for_room():
                    item = next(pipeline, None)
                    if item is None:
                        self._wait_for_seek()
                        break
                    self._keep(*item)
                    failures = 0
            except Exception as error:
                failures += 1
                self._pass_over(error, for_good=failures == MAX_FAILURES)

    def _begin(self) -> Need:
        with self._changed:
            self._changed.wait_for(lambda: self._cursor is not None)
            if self._seek is not None:
                self._cursor, self._seek = self._seek, None
                self._held.clear()
                self._counts["restarts"] += 1
            assert self._cursor is not None
            return self._cursor

    def _pipeline(self, start: Need) -> Iterator[tuple[Window, ray.ObjectRef[pa.Table], int]]:
        needs = self._plan.needs(start, self._last_step)
        while stretch := list(itertools.islice(needs, STRETCH)):
            yield from self._execute(
                [self._plan.window(*need.key) for need in stretch],
                self._plan.manifest,
                self._columns,
                self._plan.transform,
                cpus=self._cpus,
                max_bytes=self._max_bytes,
                import_paths=self._import_paths,
            )

    def _wait_for_room(self) -> bool:
        """Wait until the next window may be pulled; False: the pipeline must begin elsewhere."""
        with self._changed:
            self._changed.wait_for(lambda: self._seek is not None or self._has_room())
            return self._seek is None

    def _wait_for_seek(self) -> None:
        with self._changed:
            self._cursor = _END
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._seek is not None)

    def _has_room(self) -> bool:
        if any(need not in self._held for need in self._waiting):
            return True
        self._make_room(self._max_bytes, only_given=True)
        return self._held_bytes() < self._max_bytes

    def _keep(self, window: Window, ref: ray.ObjectRef[pa.Table], num_bytes: int) -> None:
        with self._changed:
            # Windows that nobody took may be those of a time before the run was set back.
            self._make_room(2 * self._max_bytes - num_bytes, only_given=False)
            need = Need.of(window.key)
            self._held[need] = _Held(ref, num_bytes)
            self._cursor = need._replace(shard=need.shard + 1)
            self._changed.notify_all()

    def _pass_over(self, error: Exception, for_good: bool) -> None:
        """Leave the next window to the worker that needs it: it will raise what is wrong, or succeed."""
        with self._changed:
            self._counts["failures"] += 1
            assert self._cursor is not None
            need = next(self._plan.needs(self._cursor, self._last_step), None)
            self._cursor = _END if need is None else need._replace(shard=need.shard + 1)
            if for_good:
                self._failure = f"{type(error).__name__}: {error}"
            self._changed.notify_all()
        outcome = "workers read their windows themselves" if for_good else "it goes on after the window"
        logger.warning("the Ray Data pipeline failed, %s: %s", outcome, error)

    def _held_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held.values())

    def _make_room(self, max_bytes: int, only_given: bool) -> None:
        """Let go of the oldest windows until the rest fits."""
        excess = self._held_bytes() - max_bytes
        for need, held in list(self._held.items()):
            if excess < 0:
                return
            if held.given or not only_given:
                excess -= held.num_bytes
                del self._held[need]


def start_feeder(
    plan: Plan,
    columns: Sequence[str] | None = None,
    *,
    first_step: int,
    last_step: int,
    cpus: float = 1,
    max_bytes: int | None = None,
    import_paths: Sequence[str] = (),
) -> FeederHandle:
    """A feeder on this node, to be handed to the workers' `FeederSource`. It ends with this process's job.

    plan.transform: "module:function", imported by the data tasks with `import_paths` on their path.
    first_step: the next step of the run. cpus: what the pipeline's tasks may use together. max_bytes: of
    windows held; by default what the cluster's object store can spare.
    """
    if max_bytes is None:
        # As much again may be in Ray Data's own hands, and the windows in use are the workers'.
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        max_bytes = min(MAX_BYTES, int(resources.get("object_store_memory", MAX_BYTES) / 4))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(Feeder).options(
        num_cpus=0,
        # Each worker has one request open at a time; those of dead workers linger until their deadline.
        max_concurrency=2 * plan.num_shards + 4,
        max_restarts=-1,
        scheduling_strategy=here,
    )
    feeder = actor.remote(plan, columns, last_step, cpus, max_bytes, list(import_paths))
    feeder.begin.remote(first_step)
    return feeder


class FeederSource:
    """A WindowSource that asks the feeder, and reads the window itself where the feeder has none for it.

    Reading here is the one answer to everything that can go wrong over there (a window gone past after a
    resize or rollback, lost with a node, a pipeline without CPUs, a dead feeder): same plan, same reader,
    same transform, so the same rows. misses counts how often that was.
    """

    def __init__(self, feeder: FeederHandle, reader: WindowReader, plan: Plan) -> None:
        self._feeder = feeder
        self._reader = reader
        self._plan = plan
        self._is_slow = False
        self.misses = 0

    def fetch(self, key: WindowKey, timeout_s: float) -> Block:
        # A third for the feeder to find the window, one for the rows to get here, one to read it here. A
        # feeder that let us wait in vain gets a moment only, until it delivers again.
        patience = min(timeout_s / 3, SLOW_PATIENCE_S) if self._is_slow else timeout_s / 3
        asked = time.monotonic()
        try:
            reply: list[Any] | None = ray.get(
                self._feeder.window.remote(tuple(key), patience), timeout=patience + 1
            )
            if reply is not None:
                block = decode(ray.get(reply[0], timeout=timeout_s / 3))
                self._is_slow = False
                return block
            reason = "the feeder has not got it"
        except RayError as error:
            reason = f"{type(error).__name__} {error}".splitlines()[0]
        self.misses += 1
        if time.monotonic() - asked < patience:
            logger.info("reading %s here: %s", key, reason)
        elif not self._is_slow:
            self._is_slow = True
            logger.warning(
                "Ray Data gave nothing for %.0f s (has the cluster free CPUs for it?); reading here: %s",
                patience,
                reason,
            )
        return self._reader.read(self._plan.window(*key))
