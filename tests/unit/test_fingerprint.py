"""The numeric fingerprint shows what would change the bits, and `make_deterministic` pins it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from worldline.job.fingerprint import _cpu_model, differences

PROBE = """
import json
from worldline.job.fingerprint import make_deterministic, numeric_fingerprint
before = numeric_fingerprint("fp32", "bitwise")
make_deterministic({threads})
import torch
print(json.dumps([before, numeric_fingerprint("fp32", "bitwise"), {{
    "fill": torch.utils.deterministic.fill_uninitialized_memory,
    "benchmark": torch.backends.cudnn.benchmark,
    "tf32": torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32,
}}]))
"""


def probe(threads: int) -> list[dict[str, str]]:
    """In a process of its own: the settings are the process's."""
    code = PROBE.format(threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def test_settings_are_pinned_and_show() -> None:
    before, after, settings = probe(threads=3)
    assert after["threads"] == "3"
    assert after["deterministic_algorithms"] == after["onednn_deterministic"] == "True"
    assert settings == {"fill": False, "benchmark": False, "tf32": False}
    assert any(
        line.startswith("deterministic_algorithms: False here, True there")
        for line in differences(before, after)
    )


def test_same_settings_same_fingerprint_in_another_process() -> None:
    first, second = probe(threads=1)[1], probe(threads=1)[1]
    assert differences(first, second) == []
    assert {"torch", "device", "instructions", "threads", "onednn", "precision", "mode"} <= first.keys()


def test_differences_name_each_field_with_both_values() -> None:
    ours = {"torch": "2.13.0", "threads": "1", "mode": "bitwise"}
    theirs = {"torch": "2.9.0", "threads": "1", "cudnn": "9"}
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == [
        "torch: 2.13.0 here, 2.9.0 there",
        "mode: bitwise here, not set there",
        "cudnn: not set here, 9 there",
    ]


def test_cpu_model(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: Other\n")
    assert _cpu_model(info) == "Some CPU @ 2 GHz"
    assert _cpu_model(tmp_path / "none")
