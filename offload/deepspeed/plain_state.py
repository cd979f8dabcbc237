"""Values of a loop as JSON, without pickle: numbers, text, containers, tensors and arrays."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from offload.tiers.errors import CheckpointError, UnsupportedError

_MOST_NBYTES = 64 << 20  # of one tensor: text is no place for weights
_KIND = "is"


def packed(value: Any, name: str) -> Any:
    """What JSON can hold, for `unpacked`. UnsupportedError, with the name, for other objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: packed(inner, f"{name}[{key!r}]") for key, inner in value.items()}
        pairs = [[packed(k, name), packed(v, f"{name}[{k!r}]")] for k, v in value.items()]
        return {_KIND: "dict", "of": pairs}
    if isinstance(value, list | tuple):
        items = [packed(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "of": items}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return _packed_tensor(value, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {**_packed_tensor(torch.from_numpy(np.ascontiguousarray(value)), name),
                _KIND: "array"}  # fmt: skip
    if isinstance(value, np.generic):
        return packed(value.item(), name)
    raise UnsupportedError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: nothing is pickled; "
        "keep numbers, text, tensors and containers of them there, and save other objects yourself"
    )


def _packed_tensor(value: torch.Tensor, name: str) -> dict[str, Any]:
    if value.nbytes > _MOST_NBYTES:
        raise UnsupportedError(
            f"{name} has {value.nbytes:,} bytes, more than the {_MOST_NBYTES:,} that a tensor of a "
            "client state may have; save it in a safetensors file of its own"
        )
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        _KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape), "of": base64.b64encode(raw).decode(),
    }  # fmt: skip


def unpacked(value: Any) -> Any:
    """The reverse of `packed`. CheckpointError for what it did not write."""
    if isinstance(value, list):
        return [unpacked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case None:
            return {key: unpacked(inner) for key, inner in value.items()}
        case "tuple":
            return tuple(unpacked(inner) for inner in value["of"])
        case "dict":
            return {unpacked(key): unpacked(inner) for key, inner in value["of"]}
        case "tensor":
            return _tensor(value)
        case "array":
            return _tensor(value).numpy()
    raise CheckpointError(f"a client state has a value of kind {value[_KIND]!r}, which is unknown")


def _tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a client state has a tensor of dtype {value['dtype']!r}")
    raw = bytearray(base64.b64decode(value["of"], validate=True))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
