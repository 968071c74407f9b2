"""The soak's arithmetic: what grows with each regroup is found, what does not is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.growth import WARM_UP, Sample, growth, measure, table, together

slopes = st.floats(-1e4, 1e4)


def line(process: str, level: float, slope: float, regroups: range) -> list[Sample]:
    return [Sample(process, n, (level + slope * n, 20.0, 7.0 + n)) for n in regroups]


@given(st.floats(0, 1e6), slopes)
def test_a_straight_line_has_its_slope(level: float, slope: float) -> None:
    samples = line("driver", level, slope, range(40)) + line("driver", level, slope, range(40, 60))
    [found] = growth(samples)
    assert found.slopes == pytest.approx((slope, 0.0, 1.0), abs=1e-6 * (1 + abs(slope)))
    assert (found.process, found.samples, found.regroups) == ("driver", 60 - WARM_UP, 59 - WARM_UP)


def test_what_happens_while_it_warms_up_does_not_count() -> None:
    samples = line("w", 100.0, 0.0, range(5, 30))
    samples[:WARM_UP] = [Sample("w", n, (1e6, 1e3, 1e3)) for n in range(5, 5 + WARM_UP)]
    [found] = growth(samples)
    assert found.slopes == pytest.approx((0.0, 0.0, 1.0))
    assert found.first[0] == found.last[0] == 100.0


def test_who_lived_too_short_a_time_tells_nothing() -> None:
    samples = line("w1", 1.0, 1.0, range(WARM_UP + 2)) + line("w2", 1.0, 1.0, range(30))
    assert [found.process for found in growth(samples)] == ["w2"]
    assert growth([]) == []
    assert together([]) is None
    assert together(line("w1", 1.0, 1.0, range(WARM_UP + 1))) is None


@given(slopes, st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_processes_of_different_levels_give_their_common_slope(slope: float, levels: list[float]) -> None:
    samples = [s for k, level in enumerate(levels) for s in line(f"w{k}", level, slope, range(3 * k, 20))]
    assert together(samples) == pytest.approx((slope, 0.0, 1.0), abs=1e-6 * (1 + abs(slope)))


def test_the_table_has_a_line_a_process() -> None:
    lines = table(growth(line("driver", 1000.0, 2.5, range(20)) + line("worker 7", 50.0, 0.0, range(20))))
    assert [text.split()[0] for text in lines] == ["process", "driver", "worker"]
    assert len({len(text) for text in lines}) == 1
    assert "+2.50" in lines[1]


def test_a_process_is_measured_while_it_lives() -> None:
    read, write = os.pipe()
    before = measure(os.getpid())
    os.close(read), os.close(write)
    after = measure(os.getpid())
    assert before is not None
    assert after is not None
    assert before[2] - after[2] == 2
    assert before[0] > 1000
    assert before[1] >= 1
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert measure(gone.pid) is None
