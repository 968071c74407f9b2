"""Planned windows as a Ray Data pipeline: one read task a window, the transform after it."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext, Datasource, ExecutionOptions, ExecutionResources
from ray.data.block import BlockMetadata
from ray.data.datasource.datasource import ReadTask

from worldline.data.block import apply_transform, decode, encode
from worldline.data.manifest import Manifest
from worldline.data.plan import Window
from worldline.data.reader import WindowReader
from worldline.data.transform import load_transform


class WindowDatasource(Datasource):
    """One read task, and so one block, for each of the windows, in their order."""

    def __init__(self, windows: Sequence[Window], manifest: Manifest, columns: Sequence[str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Once in the object store, not once a task: a manifest may be large.
        self._name = (manifest.digest, manifest.root, tuple(columns or ()))
        self._data_set = ray.put((manifest, columns))
        self._windows = windows

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        return [self._read_task(window) for window in self._windows]

    def _read_task(self, window: Window) -> ReadTask:
        name, data_set = self._name, self._data_set

        def read() -> Iterable[pa.Table]:
            return [_reader(name, data_set).read_table(window)]

        return ReadTask(read, BlockMetadata(window.num_rows, None, None))


def execute(
    windows: Sequence[Window],
    manifest: Manifest,
    columns: Sequence[str] | None,
    transform: str | None,
    *,
    cpus: float,
    max_bytes: int,
    import_paths: Sequence[str],
) -> Iterator[tuple[Window, ray.ObjectRef[pa.Table], int]]:
    """Run the pipeline over these windows: (window, its table, bytes), in order, as they get ready.

    What is not pulled is not made, beyond what Ray Data keeps in hand within `max_bytes`.
    """
    context = DataContext.get_current()
    context.execution_options = ExecutionOptions(
        preserve_order=True,
        resource_limits=ExecutionResources(cpu=cpus, object_store_memory=max_bytes),
    )
    # A window is one block, however large.
    context.target_max_block_size = None
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    source = WindowDatasource(windows, manifest, columns)
    pipeline = ray.data.read_datasource(source, override_num_blocks=len(windows))
    if transform is not None:
        pipeline = pipeline.map_batches(
            transform_table,
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            fn_kwargs={"transform": transform, "import_paths": list(import_paths)},
        )
    bundles = pipeline.iter_internal_ref_bundles()
    for window in windows:
        bundle = next(bundles)
        refs, num_rows = bundle.block_refs, bundle.num_rows()
        if len(refs) != 1 or num_rows != window.num_rows:
            raise RuntimeError(
                f"{window.key} has {window.num_rows} rows, "
                f"but Ray Data made {len(refs)} blocks of {num_rows} rows"
            )
        yield window, refs[0], bundle.size_bytes()


def transform_table(table: pa.Table, transform: str, import_paths: Sequence[str]) -> pa.Table:
    """The transform on a window's table, as a Ray Data task calls it."""
    sys.path.extend(path for path in import_paths if path not in sys.path)
    return encode(apply_transform(load_transform(transform), decode(table)))


_readers: dict[Hashable, WindowReader] = {}


def _reader(name: Hashable, data_set: ray.ObjectRef[Any]) -> WindowReader:
    """This process's reader; tasks that follow one another in a process share what it has decoded."""
    if name not in _readers:
        manifest, columns = ray.get(data_set)
        _readers.clear()
        _readers[name] = WindowReader(manifest, columns)
    return _readers[name]
