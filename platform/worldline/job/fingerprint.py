"""What decides the bits besides the job and its rows: the numeric fingerprint, and the settings that pin it.

Two workers whose fingerprints are equal get the same bits from the same step. One that differs is refused in
`bitwise` mode, with the field named.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

NUMERIC_VERSION = 2
"""Raised when Worldline itself comes to compute other bits from the same job, rows and machine."""


def make_deterministic(threads: int) -> None:
    """Pin, in this process, every setting of torch that would let equal steps give different bits.

    Call before the model is built and before the first CUDA operation.

    - threads: how many threads split a sum decides how it is grouped, so their number is part of the numbers.
    - deterministic algorithms: an operation that adds in the order of arrival is replaced, or raises by name.
      oneDNN (CPU) and cuDNN have a switch of their own.
    - filling new memory with NaN comes with the former as a debugging aid; it costs a pass over every buffer
      and changes no bit of a correct program, so it is off.
    - cuDNN's benchmark chooses an algorithm by a stopwatch: off.
    - TF32 and reduced-precision sums depend on the GPU model and on the library's choice: off.
    - memory-efficient attention adds gradients in the order of arrival on CUDA: off; flash attention, which
      has a deterministic backward, and the plain kernel stay.
    - cuBLAS needs a workspace of fixed size to choose the same kernel under several streams.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def numeric_fingerprint(precision: str, mode: str, device: str = "cpu") -> dict[str, str]:
    """The fingerprint of this process as it stands now: field -> value. device: "cpu", "cuda" or "cuda:N".

    Settings are read back from torch, not from the job, so that what a task changed by itself shows.
    """
    import torch

    cuda = torch.backends.cuda
    matmul = cuda.matmul
    fields = {
        "worldline_numerics": str(NUMERIC_VERSION),
        "torch": torch.__version__,
        "device": _cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "onednn": _onednn_version(),
        "precision": precision,
        "mode": mode,
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "onednn_deterministic": str(torch.backends.mkldnn.deterministic),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if torch.device(device).type != "cuda":
        return fields
    major, minor = torch.cuda.get_device_capability(device)
    return fields | {
        "device": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "cudnn_deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "cudnn_tf32": str(torch.backends.cudnn.allow_tf32),
        "reduced_precision_sums": str(
            bool(
                matmul.allow_bf16_reduced_precision_reduction or matmul.allow_fp16_reduced_precision_reduction
            )
        ),
        "memory_efficient_attention": str(cuda.mem_efficient_sdp_enabled()),  # type: ignore[no-untyped-call]
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """One line for each field the two do not share, with both values; empty where they are equal."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name}: {ours.get(name, 'not set')} here, {theirs.get(name, 'not set')} there"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name: math libraries choose kernels by maker and model, not by instruction set alone."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _onednn_version() -> str:
    import torch

    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):  # type: ignore[no-untyped-call]
        return "off"
    found = re.search(r"MKL-DNN v?(\S+)", torch.__config__.show())
    return found.group(1) if found else "on"
