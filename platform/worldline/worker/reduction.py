"""The gradients of one step: the own shards computed and folded, all shards' reduced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worldline.collective.buckets import Slab, gradient_buckets
from worldline.collective.exchange import BitwiseExchange, NativeExchange, WordExchange, exchange_bytes
from worldline.collective.group import Abandoned, CollectiveFailed
from worldline.collective.sums import GradientSums
from worldline.collective.tree import Node
from worldline.data.ledger import rows_digest
from worldline.data.loader import Loader, MicroBatch, ReadCancelled
from worldline.task import Task
from worldline.worker.agree import Agreement
from worldline.worker.buffers import BufferSums
from worldline.worker.forward import Forward
from worldline.worker.kept import Finished, Kept, Visit, walk
from worldline.worker.member import EngineSettings, Membership
from worldline.worker.metrics import MetricSums, combine_metrics
from worldline.worker.rng import seed_all
from worldline.worker.words import StepTotals, StepWords


class StepClock:
    """Where the time of one step goes, in seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.data_s = 0.0
        self.reduce_s = 0.0

    def since_start(self) -> float:
        return time.perf_counter() - self._start


@dataclass(frozen=True)
class Reduced:
    """A step's sums over all shards, the same on every rank.

    gradients, buffers: one slab a bucket, valid until the next step. metrics: the task's, as weighted means.
    """

    totals: StepTotals
    metrics: dict[str, float]
    gradients: list[Slab]
    buffers: list[Slab]


@dataclass
class _Try:
    """One try at a step. finished: what an earlier try left. broken: the exchange's first failure."""

    step: int
    rows: Sequence[int]
    finished: Finished
    words: StepWords
    clock: StepClock
    metrics: dict[int, bytes] = field(default_factory=dict)
    broken: CollectiveFailed | Abandoned | None = None


class Reduction:
    """Computes the own shards one by one and has them reduced while the last one's backward still runs.

    Protocol: `join(membership)` once a generation, then `reduce` once a step, or again for the same step
    after it raised CollectiveFailed or Abandoned (or Disagreed, at a generation's first step): shards
    finished by then and still owned are not computed again. The model's buffers are left as the last shard
    made them; the caller puts them right, by `buffers`.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        loader: Loader,
        settings: EngineSettings,
        device: torch.device,
    ) -> None:
        self._forward = Forward(task, model, device, settings.bf16)
        self._loader = loader
        self._settings = settings
        self.gradient_buckets = gradient_buckets(model)
        self.buffers = BufferSums(model, len(self.gradient_buckets))
        self._sums = GradientSums(self.gradient_buckets)
        self._finished = Finished(0)
        self._try: _Try
        self.phase = "idle"

    @property
    def phase(self) -> str:
        """What the worker is doing, for whoever looks from another thread."""
        return self.doing[0]

    @phase.setter
    def phase(self, phase: str) -> None:
        self.doing = phase, time.monotonic()

    def rehearse(self, batch: MicroBatch) -> list[Slab]:
        """The way of a step with two shards, both made of `batch`, but for the exchange; returns the sums of
        the gradients.
        """
        sums: list[Slab] = []
        self.buffers.begin()
        self._sums.begin()
        try:
            for shard in (0, 1):
                seed_all(self._settings.seed)
                loss = self._forward(batch)
                if shard == 1:
                    self._sums.arm(Node(0, 1), (), lambda _, partials: sums.extend(partials.values()))
                loss.sum.backward()  # type: ignore[no-untyped-call]
                if shard == 0:
                    self._sums.add(Node(0, 0))
            self._sums.finish()
        finally:
            self.buffers.restore()
        return sums

    def join(
        self,
        membership: Membership,
        cancelled: Callable[[], bool],
        agreement: Agreement | None,
        step: int,
    ) -> None:
        """Take this worker's place in a generation that begins with `step`; no sums are given out before all
        agree.
        """
        self._agreement = agreement
        self._membership = membership
        self._cancelled = cancelled
        buckets = [*self.gradient_buckets, *self.buffers.buckets]
        group, ranges, rank = membership.group, membership.ranges, membership.rank
        self._exchange = (
            BitwiseExchange(group, buckets, ranges, self._settings.num_shards, rank)
            if self._settings.bitwise
            else NativeExchange(group, buckets)
        )
        self._word_exchange = WordExchange(group, ranges, rank)
        self._loader.focus(membership.shards.shards, step)

    def reduce(self, step: int, rows: Sequence[int], halt: bool, clock: StepClock) -> Reduced:
        """rows: of each shard in this step. halt: this rank asks all to stop after it."""
        owned = self._membership.shards
        finished = self._finished if self._finished.step == step else Finished(step)
        self._finished = Finished(step)
        self.buffers.begin()
        self._sums.begin()
        self._exchange.begin(frozenset(v for v, n in enumerate(rows) if n))
        words = StepWords(owned.start, owned.stop - owned.start, self.buffers.num_integers)
        if halt:
            words.request_halt()
        self._try = _Try(step, rows, finished, words, clock)
        try:
            self._compute_all()
            return self._finish()
        except BaseException as error:
            agreed = self._agreement is None or self._agreement.reached()
            if agreed and isinstance(error, CollectiveFailed | Abandoned | ReadCancelled):
                self._keep()
            self._sums.renew()
            raise

    def _finish(self) -> Reduced:
        """Wait for what is on its way."""
        clock, began = self._try.clock, time.perf_counter()
        self.phase = "reduce"
        if self._try.broken is not None:
            raise self._try.broken
        if self._agreement is not None:
            self._agreement.finish()
        totals = StepTotals.combine(self._word_exchange.finish())
        slabs = self._exchange.finish()
        metrics = self._combine_metrics(totals)
        clock.reduce_s = time.perf_counter() - began
        num_gradients = len(self.gradient_buckets)
        return Reduced(totals, metrics, slabs[:num_gradients], slabs[num_gradients:])

    # The own shards, in order: computed, taken from what an earlier try finished, or absent

    def _compute_all(self) -> None:
        trial = self._try
        visits = list(walk(self._membership.shards, trial.rows, trial.finished.sums))
        to_compute = [i for i, visit in enumerate(visits) if not visit.kept and not visit.absent]
        last = to_compute[-1] if to_compute else len(visits)
        for visit in visits[:last]:
            if self._cancelled():
                raise Abandoned(f"gave up step {trial.step} at logical shard {visit.node.start} on order")
            if visit.kept or visit.absent:
                self._pass(visit)
            else:
                self._compute(visit.node.start)
                if self._settings.bitwise:
                    self._sums.add(visit.node)
        if not to_compute:
            self._start_words()
            self._sums.hand_over(self._start_bucket)
            return
        behind = visits[last + 1 :]
        for visit in behind:
            self._take_words(visit)
        self._compute(visits[last].node.start, [(visit.node, self._kept(visit)) for visit in behind])
        self._sums.finish()

    def _compute(self, shard: int, behind: Sequence[tuple[Node, Kept | None]] | None = None) -> None:
        """One logical shard: its micro-batches one by one, never merged with another's.

        behind: what comes after the last shard to compute; None for the shards before it.
        """
        trial = self._try
        self.buffers.restore()
        self.phase = "data"
        began = time.perf_counter()
        batches = self._loader.batches(trial.step, shard, cancelled=self._cancelled)
        trial.clock.data_s += time.perf_counter() - began
        self.phase = "compute"
        sums = MetricSums()
        row_ids = np.concatenate([batch.row_ids for batch in batches])
        rows = trial.rows[shard]
        if len(row_ids) != rows:
            raise RuntimeError(
                f"shard {shard} of step {trial.step}: {len(row_ids)} rows came, {rows} are planned"
            )
        for micro, batch in enumerate(batches):
            seed_all(self._settings.seed, trial.step, shard, micro)
            loss = self._forward(batch)
            sums.add(loss)
            if micro == len(batches) - 1:
                metrics = trial.metrics[shard] = sums.encode()
                trial.words.set(shard, sums.loss, sums.weight, rows, rows_digest(row_ids), len(metrics))
                trial.words.set_extra(shard, self.buffers.add(Node(0, shard), rows))
                if behind is not None:
                    self._start_last(shard, behind)
            loss.sum.backward()  # type: ignore[no-untyped-call]

    def _start_last(self, shard: int, behind: Sequence[tuple[Node, Kept | None]]) -> None:
        """Before the last backward: words and buffers can go, gradients go bucket by bucket."""
        for node, kept in behind:
            self.buffers.push(node, kept and kept[1])
        self._start_words()
        pushed = [(node, kept and kept[0]) for node, kept in behind] if self._settings.bitwise else []
        self._sums.arm(Node(0, shard), pushed, self._start_bucket)

    # What an earlier try finished, and what this one leaves

    def _pass(self, visit: Visit) -> None:
        """Shards that need not be computed."""
        kept = self._kept(visit)
        if self._settings.bitwise:
            self._sums.push(visit.node, kept and kept[0])
        self.buffers.push(visit.node, kept and kept[1])
        self._take_words(visit)

    def _kept(self, visit: Visit) -> Kept | None:
        return self._try.finished.sums[visit.node] if visit.kept else None

    def _take_words(self, visit: Visit) -> None:
        trial = self._try
        for shard in range(visit.node.start, visit.node.stop):
            if shard in trial.finished.words:
                trial.words.put(shard, trial.finished.words[shard])
                trial.metrics[shard] = trial.finished.metrics[shard]

    def _keep(self) -> None:
        """The step is not completed; what is done of it stays good."""
        if not self._settings.bitwise:
            return
        trial, finished = self._try, self._finished
        buffers = self.buffers.take()
        for node, slabs in self._sums.take().items():
            finished.sums[node] = (slabs, buffers.get(node, []))
            for shard in range(node.start, node.stop):
                if shard in trial.metrics:
                    finished.words[shard] = trial.words.get(shard)
                    finished.metrics[shard] = trial.metrics[shard]

    # The exchange. A failure inside backward must not end it: the shard's sums would be torn between buckets.

    def _start_words(self) -> None:
        trial = self._try
        label = f"words of step {trial.step}"
        self._unless_broken(lambda: self._word_exchange.start(trial.words.tensor, label))

    def _start_bucket(self, index: int, partials: dict[Node, Slab]) -> None:
        self._unless_broken(lambda: self._exchange.start(index, partials))
        self._unless_broken(self._exchange.advance)
        if index == len(self.gradient_buckets) - 1:
            self._unless_broken(self._start_buffers)

    def _start_buffers(self) -> None:
        for i, bucket in enumerate(self.buffers.buckets):
            self._exchange.start(bucket.index, self.buffers.partials(i))

    def _unless_broken(self, call: Callable[[], None]) -> None:
        """Note the first failure, to be raised after the backward; start nothing after it."""
        if self._try.broken is None:
            try:
                call()
            except (CollectiveFailed, Abandoned) as error:
                self._try.broken = error

    def _combine_metrics(self, totals: StepTotals) -> dict[str, float]:
        if not any(totals.metrics_lengths):
            return {}
        member, metrics = self._membership, self._try.metrics
        lengths = [sum(totals.metrics_lengths[r.start : r.stop]) for r in member.ranges]
        mine = b"".join(metrics[shard] for shard in sorted(metrics))
        joined = b"".join(exchange_bytes(member.group, mine, lengths, "metrics"))
        return combine_metrics(joined, totals.metrics_lengths)
