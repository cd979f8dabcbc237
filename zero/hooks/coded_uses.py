"""Computing with a group's weights as they are stored, where no gradients are recorded.

A linear layer that gets few tokens multiplies straight from codes, and an embedding decodes the
rows that are looked up: neither writes values into a slot. What is stored as it is (norms, biases)
is used where it is. Everything else decodes the whole group.

    F.linear(x, coded)         at most MOST_ROWS rows of x: `kernels.weight_products`
    F.embedding(ids, coded)    the rows of ids
    norms, products, sums      with parameters that are stored raw

Which way is taken depends on the operation and the shapes of its inputs, and on whether the group's
values are gathered by then (`gathered`, an operation before that needed them), never on where the
codes live or what copies memory holds: a product straight from codes adds up in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from offload.kernels.cpu.weight_codes import decode_weights
from offload.kernels.cpu.weight_products import MOST_ROWS, in_lane_order, multiply
from offload.kernels.floats import Runner, serial
from offload.kernels.weight_formats import Code
from offload.zero.groups.bits import FLOAT_OF, flat_array
from offload.zero.groups.coded_layout import CodedPart
from offload.zero.groups.weight_codes import WeightCodes, split_codes

# Operations whose result is no view of what they read, and that write to none of it.
_PURE = frozenset(
    {
        "linear", "rms_norm", "layer_norm", "mul", "__mul__", "__rmul__", "add", "__add__",
        "__radd__",
    }
)  # fmt: skip


@dataclass(frozen=True)
class StoredParam:
    """A parameter in its group's stored bytes."""

    part: CodedPart
    stored: torch.Tensor  # its own bytes, 1D uint8 in host memory; kept while there is a view
    codec: WeightCodes
    dtype: torch.dtype

    def raw(self) -> torch.Tensor:
        """Return the values of a parameter that is stored as it is."""
        return self.stored.view(self.dtype).view(self.part.spec.shape)


def compute(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any],
    find: Callable[[Any], StoredParam | None],
) -> Any:  # fmt: skip
    """Return the result of `function` for released parameters that `find` knows; NotImplemented if
    it takes their decoded values. Gradients are not recorded meanwhile."""
    if function is functional.embedding:
        return _embedding(*args, **kwargs, find=find)
    if not _is_pure(name, args, kwargs, find):
        return NotImplemented
    if function is functional.linear:
        found = _linear(*args, **kwargs, find=find)
        if found is not NotImplemented:
            return found
    try:
        raw = [_as_raw(value, find) for value in args]
        named = {key: _as_raw(value, find) for key, value in kwargs.items()}
    except _IsCodedError:
        return NotImplemented
    return function(*raw, **named)


def _is_pure(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any],
    find: Callable[[Any], StoredParam | None],
) -> bool:  # fmt: skip
    """Return whether the result is no view of a parameter, and none is written to."""
    if name == "float":
        found = find(args[0])
        return found is not None and found.dtype is not torch.float32
    return name in _PURE and "out" not in kwargs


class _IsCodedError(Exception):
    """Raised when a parameter's values have to be decoded."""


def _as_raw(value: Any, find: Callable[[Any], StoredParam | None]) -> Any:
    found = find(value)
    if found is None:
        return value
    if found.part.weights is not None:
        raise _IsCodedError
    return found.raw()


def _linear(
    input: torch.Tensor, weight: Any, bias: Any = None, *,  # noqa: A002
    find: Callable[[Any], StoredParam | None],
) -> Any:  # fmt: skip
    """Compute `torch.nn.functional.linear`, whose argument names these are."""
    stored = find(weight)
    if stored is None or not multiplies(input, stored.part):
        return NotImplemented
    if type(input) is not torch.Tensor or input.dtype is not stored.dtype:
        return NotImplemented
    if torch.is_autocast_enabled("cpu"):
        return NotImplemented
    # its own shape would be asked of the released parameter, which takes longer
    if input.device != stored.stored.device or input.shape[-1] != stored.part.spec.shape[1]:
        return NotImplemented  # an error of PyTorch's
    run = stored.codec.runner(stored.part)
    return linear(input, stored.stored, stored.part, _as_raw(bias, find), run)


def _embedding(
    input: torch.Tensor, weight: Any, padding_idx: int | None = None,  # noqa: A002
    max_norm: float | None = None, *rest: Any, find: Callable[[Any], StoredParam | None],
    **others: Any,
) -> Any:  # fmt: skip
    """Compute `torch.nn.functional.embedding`, whose argument names these are."""
    stored = find(weight)
    if stored is None or stored.part.weights is None or max_norm is not None:
        return NotImplemented
    rows, row = stored.part.spec.shape
    size = stored.part.weights.group_size
    if row % size or input.numel() >= rows or input.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    flat = input.reshape(-1).long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < rows:
        return NotImplemented  # an error of PyTorch's
    words, codes, _ = split_codes(stored.stored, stored.part.weights, stored.part.spec.numel)
    chosen = words.view(rows, -1)[flat], codes.view(rows, -1)[flat]
    out = torch.empty(len(flat), row, dtype=stored.dtype)
    decode_weights(
        chosen[0].reshape(-1).numpy().view(np.uint32), chosen[1].reshape(-1).numpy(),
        flat_array(out), stored.part.weights, stored.codec.kind,
    )  # fmt: skip
    return out.view(*input.shape, row)


def multiplies(x: torch.Tensor, part: CodedPart) -> bool:
    """Return whether `linear` takes less time for `x` than decoding and torch's `linear`."""
    rows = math.prod(x.shape[:-1])
    weights = part.weights
    if weights is None or len(part.spec.shape) != 2 or not 0 < rows <= MOST_ROWS:
        return False
    return weights.code is not Code.NF4 or part.spec.shape[1] % weights.group_size == 0


def linear(
    x: torch.Tensor, stored: torch.Tensor, part: CodedPart, bias: torch.Tensor | None = None,
    run: Runner = serial,
) -> torch.Tensor:  # fmt: skip
    """Compute `torch.nn.functional.linear(x, weight, bias)`, where `stored` (uint8) has the codes
    of a weight of `x`'s dtype. x (..., in_features), on the CPU; sums and bias are added in fp32
    and rounded once. Records nothing for backward.

    `run` shares ranges of the weight's rows among threads. Raises ValueError if shapes do not fit.
    """
    assert part.weights is not None, "a parameter that is stored as it is"
    columns, inner = part.spec.shape
    if x.shape[-1] != inner:
        raise ValueError(f"{part.spec.name}: x has {x.shape[-1]} features, expected {inner}")
    flat = x.detach().reshape(-1, inner).float().numpy()
    words, codes, _ = split_codes(stored, part.weights, part.spec.numel)
    out = torch.empty(len(flat), columns)
    multiply(
        in_lane_order(flat, part.weights), words.numpy().view(np.uint32), codes.numpy(),
        out.numpy(), part.weights, FLOAT_OF[x.dtype], run,
    )  # fmt: skip
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], columns)
