"""A window's rows in memory, and the way between Arrow and NumPy. Pure, apart from calling the transform.

The in-process reader and Ray Data both pass a transform's result through Arrow, so that a column has the same
type and bytes whoever made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from worldline.data.manifest import DataError, IntArray

Columns = dict[str, npt.NDArray[Any]]
Transform = Callable[[Columns], Mapping[str, npt.NDArray[Any]]]

ROW_ID = "__row_id__"


@dataclass(frozen=True)
class Block:
    """Rows of one window in shuffled order. The arrays may be views of shared memory: never write to them."""

    columns: Columns
    row_ids: IntArray

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes for a in self.columns.values()) + self.row_ids.nbytes


def decode(table: pa.Table) -> Block:
    """The Block that a table with a ROW_ID column holds.

    Numbers, booleans and times become arrays of their type, lists of one length arrays of more dimensions,
    all else (strings, bytes, lists of several lengths) arrays of objects.
    """
    columns = {name: _to_numpy(name, _one_chunk(table[name])) for name in table.column_names}
    row_ids = columns.pop(ROW_ID)
    return Block(columns, row_ids)


def encode(block: Block) -> pa.Table:
    """The table that decodes to this block."""
    arrays = {name: _to_arrow(name, np.asarray(values)) for name, values in block.columns.items()}
    return pa.table(arrays | {ROW_ID: plain_array(block.row_ids)})


def plain_array(values: npt.NDArray[Any]) -> pa.Array:
    """Native numbers as an Arrow array without nulls.

    As `pa.array` makes it, which imports pandas if that is installed: a sixth of the time a worker starts in.
    """
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def apply_transform(transform: Transform, block: Block) -> Block:
    """The block with the transform's columns; the transform must keep each row in its place."""
    name = transform_name(transform)
    try:
        result = transform(dict(block.columns))
    except Exception as error:
        raise DataError(f"transform {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Mapping) or not result:
        raise DataError(f"transform {name} must return a dict of arrays, not {type(result).__name__}")
    columns = {}
    for column, values in result.items():
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            raise DataError(
                f"transform {name} must return NumPy arrays; {column!r} is {type(values).__name__}"
            )
        if len(values) != block.num_rows:
            raise DataError(
                f"transform {name} was given {block.num_rows} rows and returned {len(values)} in {column!r}: "
                "it must turn each row into one row, in the same order"
            )
        columns[str(column)] = values
    # Through Arrow and back: what the other pipeline does, too.
    return decode(encode(Block(columns, block.row_ids)))


def transform_name(transform: Transform) -> str:
    return f"{transform.__module__}:{getattr(transform, '__qualname__', type(transform).__qualname__)}"


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _to_numpy(name: str, array: pa.Array) -> npt.NDArray[Any]:
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists_to_numpy(name, array)
    if array.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"column {name!r} ({kind}) has nulls, for which {kind} has no value")
    if not array.null_count and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return _plain_numpy(array)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def _plain_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """A view of an array's numbers; without pandas, as `plain_array`."""
    kind = array.type
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    dtype = np.dtype(f"{letter}{kind.bit_width // 8}")
    if not len(array):
        return np.empty(0, dtype)
    values = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    values.flags.writeable = False  # as it is of a buffer that Arrow has read
    return values


def _lists_to_numpy(name: str, array: pa.Array) -> npt.NDArray[Any]:
    if array.null_count == 0:
        fixed = pa.types.is_fixed_size_list(array.type)
        lengths = [array.type.list_size] if fixed else array.value_lengths().unique().to_pylist()
        if len(lengths) == 1:
            items = _to_numpy(name, array.flatten())
            return items.reshape(len(array), lengths[0], *items.shape[1:])
    rows = np.empty(len(array), dtype=object)
    for i, row in enumerate(array):
        rows[i] = None if row.values is None else _to_numpy(name, row.values)
    return rows


def _to_arrow(name: str, values: npt.NDArray[Any]) -> pa.Array:
    try:
        if values.ndim > 1:
            rows, size, *rest = values.shape
            inner = _to_arrow(name, np.ascontiguousarray(values).reshape(rows * size, *rest))
            return pa.FixedSizeListArray.from_arrays(inner, size)
        if values.dtype == object:
            return pa.array(list(values), from_pandas=False)
        if values.dtype.kind in "iuf" and values.dtype.isnative:
            return plain_array(values)
        return pa.array(np.ascontiguousarray(values), from_pandas=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as error:
        raise DataError(
            f"column {name!r} of type {values.dtype} cannot be stored as an Arrow column: {error}"
        ) from error
