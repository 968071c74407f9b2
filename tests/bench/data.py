"""Random regression rows as Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(folder: Path, num_rows: int, width: int, num_files: int = 4) -> None:
    """x: float32 [rows, width], y: a noisy function of it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    for i in range(num_files):
        x = rng.normal(size=(num_rows // num_files, width)).astype(np.float32)
        y = np.sin(x.sum(axis=1)) + 0.1 * rng.normal(size=len(x)).astype(np.float32)
        columns = {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), width),
            "y": pa.array(y.astype(np.float32)),
        }
        pq.write_table(pa.table(columns), folder / f"part-{i}.parquet", row_group_size=4096)
