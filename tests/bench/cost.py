"""What Worldline costs when nothing happens: its step against plain DDP's, in the same processes,
alternately.

Both train the benchmark MLP with AdamW and clipping over gloo on one thread a worker, on the same number of
rows a step, in the same micro-batches: DDP runs all but the last under `no_sync()`. DDP's rows lie ready in
memory; Worldline reads Parquet through its loader. The kinds take turns in short blocks, in an order shuffled
anew every round, so that the machine's noise falls on all alike; a ratio is taken round by round. Also shown:
a second DDP, whose ratio is what the machine's noise alone makes of 1; DDP with the micro-batches merged into
one; and where Worldline's time goes.

    python tests/bench/cost.py [--rounds 30] [--worlds 1 2 4]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from data import write_rows
from mlp import WIDTH, Mlp
from torch.nn.parallel import DistributedDataParallel

from worldline.collective.forming import form_gloo
from worldline.data.loader import Loader
from worldline.data.plan import Plan
from worldline.data.reader import LocalSource, WindowReader
from worldline.data.scan import scan
from worldline.events import StepRecord
from worldline.job.fingerprint import make_deterministic
from worldline.worker.engine import Engine
from worldline.worker.member import EngineSettings, Membership
from worldline.worker.state import TrainState, digest
from worldline.world import assign

ROWS = 160
SHARDS_A_WORKER = 4
STEPS_A_BLOCK = 5
DIGEST_EVERY = 50
CLIP = 1.0

Block = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wl-") as folder:
        write_rows(Path(folder) / "data", 131072, WIDTH)
        for world in arguments.worlds:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            torch.multiprocessing.spawn(
                worker, (world, store.port, folder, arguments.rounds), nprocs=world, join=True
            )


def worker(rank: int, world: int, port: int, folder: str, rounds: int) -> None:
    make_deterministic(threads=1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("ddp", store), rank=rank, world_size=world)
    records: dict[str, list[StepRecord]] = {"bitwise": [], "same_batches": []}
    blocks: dict[str, Block] = {
        "DDP": ddp_block(rank, world, merged=False),
        "DDP again": ddp_block(rank, world, merged=False),
        "DDP, merged": ddp_block(rank, world, merged=True),
        **{mode: worldline_block(mode, rank, world, store, folder, records[mode]) for mode in records},
    }
    for block in blocks.values():
        block()
    for taken in records.values():
        taken.clear()
    times: dict[str, list[float]] = {kind: [] for kind in blocks}
    order = random.Random(world)
    for _ in range(rounds):
        for kind in order.sample(sorted(blocks), len(blocks)):
            dist.barrier()
            began = time.perf_counter()
            blocks[kind]()
            dist.barrier()
            times[kind].append((time.perf_counter() - began) / STEPS_A_BLOCK)
    if rank == 0:
        report(world, times, records)
    dist.destroy_process_group()


def ddp_block(rank: int, world: int, merged: bool) -> Block:
    torch.manual_seed(0)
    task = Mlp()
    model = DistributedDataParallel(task.build_model(), gradient_as_bucket_view=True)
    optimizer = task.build_optimizer(model)
    micro_batches = 1 if merged else SHARDS_A_WORKER
    rows = ROWS * SHARDS_A_WORKER // micro_batches
    batches = [{"x": torch.randn(rows, WIDTH), "y": torch.randn(rows)} for _ in range(micro_batches)]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with model.no_sync():
            for batch in batches[:-1]:
                (task.loss(model, batch) / micro_batches).backward()
        loss = task.loss(model, batches[-1]) / micro_batches
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return lambda: [step() for _ in range(STEPS_A_BLOCK)] and None


def worldline_block(
    mode: str, rank: int, world: int, store: dist.TCPStore, folder: str, records: list[StepRecord]
) -> Block:
    torch.manual_seed(0)
    task = Mlp()
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    num_shards = SHARDS_A_WORKER * world
    plan = Plan(scan(f"{folder}/data"), seed=1, num_shards=num_shards, rows_per_shard=ROWS, window_rows=4096)
    loader = Loader(plan, LocalSource(WindowReader(plan.manifest), plan), ROWS)
    settings = EngineSettings(num_shards, 1, CLIP, False, False, mode == "bitwise")
    engine = Engine(task, model, optimizer, None, plan, loader, settings, torch.device("cpu"))
    group = (
        form_gloo(
            store,
            prefix=mode,
            rank=rank,
            size=world,
            address="127.0.0.1",
            form_timeout_s=60,
            timeout_s=60,
            cancelled=lambda: False,
        )
        if world > 1
        else None
    )
    state = TrainState(model, optimizer)
    engine.join(Membership(1, 1, rank, assign(num_shards, world), group), lambda: False)

    def digest_if_due(step: int) -> str | None:
        return digest(state.tensors(), state.meta()) if step % DIGEST_EVERY == 0 else None

    def run() -> None:
        for _ in range(STEPS_A_BLOCK):
            records.append(engine.step(halt=False, digest=digest_if_due).record)

    return run


def report(world: int, times: dict[str, list[float]], records: dict[str, list[StepRecord]]) -> None:
    base = times["DDP"]
    print(f"\n{world} workers on {os.cpu_count()} cores; DDP's step takes {median_ms(base):.1f} ms")
    for kind, taken in times.items():
        if kind != "DDP":
            ratios = [ours / ddp for ours, ddp in zip(taken, base, strict=True)]
            low, high = interval(ratios)
            print(
                f"  {kind:13} {statistics.median(ratios):.3f} x DDP  (95 % interval {low:.3f} to {high:.3f})"
            )
    for mode, taken_records in records.items():
        data, compute, reduce = (
            statistics.mean(getattr(r, name) for r in taken_records) * 1e3
            for name in ("data_s", "compute_s", "reduce_s")
        )
        print(
            f"  {mode:13} data {data:.2f}, compute and update {compute:.1f}, "
            f"waiting for the reduction {reduce:.1f} ms"
        )


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def interval(values: list[float], resamples: int = 2000) -> tuple[float, float]:
    """The bootstrap's 95 % interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, size=(resamples, len(values))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


if __name__ == "__main__":
    main()
