"""Write the rows of `digits.yaml`: scikit-learn's 1,797 handwritten digits, some of them held out.

python jobs/digits_data.py [FOLDER]          (default data/digits; left alone where it is there already)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

TRAIN_ROWS = 1536  # 24 steps of 8 shards of 8 rows: none is short, BatchNorm never meets a single row
ROW_GROUP = 128


def write(folder: Path) -> None:
    """Write beside the folder first and rename, so that a half-written folder is never taken for data."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = [image.astype(np.uint8).tobytes() for image in digits.images[order]]
    table = pa.table({"image": images, "label": digits.target[order].astype(np.int64)})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        for name, part in (("train", table[:TRAIN_ROWS]), ("validation", table[TRAIN_ROWS:])):
            pq.write_table(part, made / f"{name}.parquet", row_group_size=ROW_GROUP)
        made.rename(folder)
    print(f"{folder}: {TRAIN_ROWS} rows to train on, {len(table) - TRAIN_ROWS} held out")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "data/digits")
    if not target.exists():
        write(target)
