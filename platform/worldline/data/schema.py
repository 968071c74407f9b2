"""One schema for all files: which differences between files are harmless, and which are not."""

from __future__ import annotations

import re

import pyarrow as pa

_LIST = re.compile(r"^list<item: (?P<item>.+)>$")
_FIXED_LIST = re.compile(r"^fixed_size_list<item: (?P<item>.+)>\[(?P<size>\d+)\]$")
_ZONED = re.compile(r"^timestamp\[(?P<unit>\w+), tz=(?P<zone>[^\]]+)\]$")
_DECIMAL = re.compile(r"^decimal128\((?P<digits>\d+), (?P<scale>-?\d+)\)$")


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without what depends on the file's writer: dictionaries, names of list items, large lists."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type both can be cast to without loss in the usual case; None where they conflict.

    An all-null column takes any type, narrow numbers become wide ones.
    """
    if a == b:
        return a
    try:
        merged = pa.unify_schemas(
            [pa.schema([("column", a)]), pa.schema([("column", b)])], promote_options="permissive"
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    kind = plain_type(merged.field(0).type)
    return kind if parse_type(str(kind)) == kind else None


def parse_type(text: str) -> pa.DataType | None:
    """The type that `str(type)` wrote, for simple types and lists of them; else None."""
    if match := _LIST.match(text):
        item = parse_type(match["item"])
        return None if item is None else pa.list_(item)
    if match := _FIXED_LIST.match(text):
        item = parse_type(match["item"])
        return None if item is None else pa.list_(item, int(match["size"]))
    if match := _ZONED.match(text):
        return pa.timestamp(match["unit"], match["zone"])
    if match := _DECIMAL.match(text):
        return pa.decimal128(int(match["digits"]), int(match["scale"]))
    try:
        return pa.type_for_alias(text)
    except ValueError:
        return None
