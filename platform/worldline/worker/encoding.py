"""Python values as JSON and back, equal in type and in every bit. Never pickle.

What JSON cannot say is an object with one key that starts with "$". Tensors inside a value are the caller's:
it says what stands for one and how to find it again.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worldline.tensors import dtype_name, tensor_bytes

Encode = Callable[[str, torch.Tensor], Any]
Decode = Callable[[str, Any], torch.Tensor]


class StateError(Exception):
    """Training state that cannot be stored, or does not fit where it is to be loaded."""


_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def encode(value: Any, path: str, encode_tensor: Encode) -> Any:
    """A JSON tree for `value`. path: its name, for messages and as the place of tensors in it.

    Only exact types are taken: a subclass may carry more than its value. Raises StateError naming the place.
    """

    def inner(item: Any, step: object) -> Any:
        return encode(item, f"{path}/{step}", encode_tensor)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is list:
        return [inner(item, i) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [inner(item, i) for i, item in enumerate(value)]}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, key) for key, item in value.items()}
    if kind in _MAPPINGS:
        return {_MAPPINGS[kind]: [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, torch.Tensor):
        return {"$tensor": encode_tensor(path, value)}
    raise StateError(
        f"cannot store {path}: it is a {kind.__module__}.{kind.__qualname__}; "
        "state may hold tensors, numbers, strings, lists, tuples and dicts"
    )


def decode(tree: Any, path: str, decode_tensor: Decode) -> Any:
    """The value that `encode` made `tree` of."""

    def inner(item: Any, step: object) -> Any:
        return decode(item, f"{path}/{step}", decode_tensor)

    def mapping(kind: type) -> Any:
        keys = [inner(key, "key") for key, _ in content]
        return kind({key: inner(item, key) for key, (_, item) in zip(keys, content, strict=True)})

    if isinstance(tree, list):
        return [inner(item, i) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    tag: str
    content: Any
    tag, content = next(iter(tree.items()), ("", None))
    match tag:
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "$tuple":
            return tuple(inner(item, i) for i, item in enumerate(content))
        case "$dict":
            return mapping(dict)
        case "$ordered":
            return mapping(OrderedDict)
        case "$counter":
            return mapping(Counter)
        case "$bytes":
            return bytes.fromhex(content)
        case "$numpy":
            dtype, data = content
            return np.frombuffer(bytes.fromhex(data), np.dtype(dtype))[0]
        case "$tensor":
            return decode_tensor(path, content)
    if tag.startswith("$"):
        raise StateError(f"{path} is written as {tag}, which this version does not know")
    return {key: inner(item, key) for key, item in tree.items()}


def encode_inline(path: str, tensor: torch.Tensor) -> Any:
    """A small tensor written out in the tree, such as a learning rate kept as a tensor."""
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "data": tensor_bytes(tensor).hex(),
    }


def decode_inline(path: str, content: Any) -> torch.Tensor:
    tensor = torch.empty(content["shape"], dtype=getattr(torch, content["dtype"]))
    tensor_bytes(tensor)[:] = bytes.fromhex(content["data"])
    return tensor


def canonical_json(tree: Any) -> bytes:
    """The same bytes for equal trees, whatever the order of their keys."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
