"""Values of a loop as JSON, without pickle: numbers, text, containers, tensors and arrays."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from offload.tiers.errors import CheckpointError, UnsupportedError

_KIND = "is"

PackTensor = Callable[[torch.Tensor, str], dict[str, Any]]
UnpackTensor = Callable[[dict[str, Any]], torch.Tensor]


def packed(value: Any, name: str, tensor: PackTensor) -> Any:
    """A JSON value for `unpacked`; `tensor` returns what represents a tensor. UnsupportedError,
    with the name, for other objects."""
    try:
        return _packed(value, name, tensor)
    except (TypeError, ValueError, RuntimeError) as error:  # deep, or in a circle
        raise UnsupportedError(f"{name} cannot be kept in a checkpoint: {error!s:.200}") from error


def check_plain(value: Any, name: str) -> None:
    """Raise UnsupportedError, with the name, for a value that `packed` refuses."""
    packed(value, name, lambda tensor, what: {})


def _packed(value: Any, name: str, tensor: PackTensor) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return _packed_dict(value, name, tensor)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_packed(inner, f"{name}[{i}]", tensor) for i, inner in enumerate(value)]
        kinds = {tuple: "tuple", set: "set", frozenset: "frozenset"}
        kind = next((text for of, text in kinds.items() if isinstance(value, of)), None)
        return items if kind is None else {_KIND: kind, "of": items}
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return {_KIND: "scalar", "dtype": value.dtype.name, "of": value.item()}
    try:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return {_KIND: "tensor", **tensor(value, name)}
        if isinstance(value, np.ndarray) and _is_plain(value.dtype) and not np.ma.isMA(value):
            native = value.dtype.newbyteorder("=")
            whole = torch.from_numpy(np.array(value, native, order="C"))  # it may be read-only
            return {_KIND: "array", **tensor(whole, name)}
    except (TypeError, RuntimeError) as error:  # it has no values, or not in one piece
        raise UnsupportedError(f"{name} cannot be kept in a checkpoint: {error!s:.200}") from error
    raise UnsupportedError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: nothing is pickled; "
        "keep numbers, text, tensors and containers of them there, and save other objects yourself"
    )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether PyTorch has this dtype, too."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _packed_dict(value: dict[Any, Any], name: str, tensor: PackTensor) -> dict[str, Any]:
    counts = isinstance(value, Counter)  # a scheduler of torch asks it for its elements
    if not counts and all(isinstance(key, str) for key in value) and _KIND not in value:
        return {key: _packed(inner, f"{name}[{key!r}]", tensor) for key, inner in value.items()}
    pairs = [
        [_packed(key, name, tensor), _packed(inner, f"{name}[{key!r}]", tensor)]
        for key, inner in value.items()
    ]
    return {_KIND: "counter" if counts else "dict", "of": pairs}


def unpacked(value: Any, tensor: UnpackTensor) -> Any:
    """The value that was `packed`. CheckpointError for one that it did not write."""
    try:
        return _unpacked(value, tensor)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"a saved state is malformed: {error!s:.200}") from None


def _unpacked(value: Any, tensor: UnpackTensor) -> Any:
    if isinstance(value, list):
        return [_unpacked(inner, tensor) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    match kind:
        case None:
            return {key: _unpacked(inner, tensor) for key, inner in value.items()}
        case "tuple":
            return tuple(_unpacked(inner, tensor) for inner in value["of"])
        case "set":
            return {_unpacked(inner, tensor) for inner in value["of"]}
        case "frozenset":
            return frozenset(_unpacked(inner, tensor) for inner in value["of"])
        case "dict" | "counter":
            pairs = {_unpacked(k, tensor): _unpacked(v, tensor) for k, v in value["of"]}
            return Counter(pairs) if kind == "counter" else pairs
        case "bytes":
            return base64.b64decode(value["of"], validate=True)
        case "scalar":
            dtype = np.dtype(value["dtype"])
            if not _is_plain(dtype):
                raise CheckpointError(f"a saved state has a number of dtype {dtype}")
            return dtype.type(value["of"])
        case "tensor":
            return tensor(value)
        case "array":
            return tensor(value).numpy()
    raise CheckpointError(f"a saved state has a value of kind {kind!r:.40}, which is unknown")
