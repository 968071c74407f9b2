"""Whether a process grows with each regroup it lives through. Pure, but for `measure`."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

METRICS = ("memory KiB", "threads", "files")
WARM_UP = 2
"""Regroups in which a process is allowed to fill its caches."""


@dataclass(frozen=True)
class Sample:
    """One look at one process. regroups: of the run until then. values: one for each of METRICS."""

    process: str
    regroups: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Growth:
    """regroups: from the first to the last sample that counts. slopes: of METRICS, for each regroup; first,
    last: medians of the first and the last tenth of the samples.
    """

    process: str
    samples: int
    regroups: int
    first: tuple[float, ...]
    last: tuple[float, ...]
    slopes: tuple[float, ...]


def measure(pid: int) -> tuple[float, ...] | None:
    """Values of METRICS now, from /proc; None if the process is gone or may not be looked at."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    resident = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    if resident is None or threads is None:  # a zombie
        return None
    return float(resident[1]), float(threads[1]), float(files)


def growth(samples: Iterable[Sample]) -> list[Growth]:
    """Of each process that lived through enough regroups to tell, in the order of their coming."""
    found = []
    for process, own in _by_process(samples).items():
        counted = [sample for sample in own if sample.regroups >= own[0].regroups + WARM_UP]
        if len({sample.regroups for sample in counted}) < 3:
            continue
        tenth = max(1, len(counted) // 10)
        found.append(
            Growth(
                process,
                len(counted),
                counted[-1].regroups - counted[0].regroups,
                _medians(counted[:tenth]),
                _medians(counted[-tenth:]),
                _slopes([counted]),
            )
        )
    return found


def together(samples: Iterable[Sample]) -> tuple[float, ...] | None:
    """The slopes that fit all processes best, each from a level of its own; None if nothing can be fitted."""
    counted = []
    for own in _by_process(samples).values():
        counted.append([sample for sample in own if sample.regroups >= own[0].regroups + WARM_UP])
    if not any(len({sample.regroups for sample in own}) > 1 for own in counted):
        return None
    return _slopes(counted)


def table(rows: Sequence[Growth]) -> list[str]:
    """Lines for people."""
    head = f"{'process':<16} {'samples':>7} {'regroups':>8}"
    lines = [head + "".join(f"  {f'{metric}: first, last, per regroup':>36}" for metric in METRICS)]
    for row in rows:
        line = f"{row.process:<16} {row.samples:>7} {row.regroups:>8}"
        for first, last, slope in zip(row.first, row.last, row.slopes, strict=True):
            line += f"  {f'{first:,.0f}':>12} {f'{last:,.0f}':>12} {slope:>+10.2f}"
        lines.append(line)
    return lines


def _by_process(samples: Iterable[Sample]) -> Mapping[str, list[Sample]]:
    processes: dict[str, list[Sample]] = {}
    for sample in samples:
        processes.setdefault(sample.process, []).append(sample)
    return processes


def _medians(samples: Sequence[Sample]) -> tuple[float, ...]:
    return tuple(statistics.median(values) for values in zip(*(s.values for s in samples), strict=True))


def _slopes(groups: Sequence[Sequence[Sample]]) -> tuple[float, ...]:
    """Least squares of each metric over the regroups, every group from its own mean."""
    products, squares = [0.0] * len(METRICS), 0.0
    for group in groups:
        if not group:
            continue
        middle = statistics.fmean(sample.regroups for sample in group)
        means = [statistics.fmean(values) for values in zip(*(s.values for s in group), strict=True)]
        for sample in group:
            off = sample.regroups - middle
            squares += off * off
            for k, mean in enumerate(means):
                products[k] += off * (sample.values[k] - mean)
    return tuple(product / squares for product in products)
