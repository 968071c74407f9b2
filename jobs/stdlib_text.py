"""Write the text of `stdlib-gpt.yaml`: the running Python's own standard library, cut into byte chunks.

    python jobs/stdlib_text.py [FOLDER]          (default data/stdlib; left alone where it is there already)

The files depend on the Python's version alone: same version, same bytes.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

CHUNK = 129  # bytes a row: a context of 128 and the byte after it
FILES = 4
ROW_GROUP = 2048
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def source_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*.py") if not LEFT_OUT.intersection(p.relative_to(root).parts))


def chunks(text: bytes, size: int = CHUNK) -> list[bytes]:
    """Equally long pieces; what is left at the end is dropped."""
    return [text[at : at + size] for at in range(0, len(text) - size + 1, size)]


def write(folder: Path) -> None:
    """Write beside the folder first and rename, so that a half-written folder is never taken for data."""
    root = Path(sysconfig.get_path("stdlib"))
    rows = chunks(b"\n".join(path.read_bytes() for path in source_files(root)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        per_file = -(-len(rows) // FILES)
        for number in range(FILES):
            table = pa.table({"text": rows[number * per_file : (number + 1) * per_file]})
            pq.write_table(table, made / f"part-{number:02}.parquet", row_group_size=ROW_GROUP)
        made.rename(folder)
    print(f"{folder}: {len(rows)} rows of {CHUNK} bytes in {FILES} files")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "data/stdlib")
    if not target.exists():
        write(target)
