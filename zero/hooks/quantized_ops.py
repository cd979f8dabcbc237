"""Computing with a group's weights as they are stored, where no gradients are recorded.

    F.linear(x, quantized)      at most MAX_ROWS rows of x: `kernels.cpu.weight_products`
    F.embedding(ids, quantized) dequantizes the rows of ids
    norms, products, sums       with parameters that are stored as they are

None of these writes values into a slot; everything else dequantizes the whole group. Which way is
taken depends on the operation and the shapes of its inputs, and on whether the group's values are
gathered by then (`gathered`, an operation before that needed them), never on where the group lives
or what copies memory holds: a product with quantized weights adds up in another order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from offload.kernels.bits import flat_array
from offload.kernels.cpu.quantization import dequantize_weights
from offload.kernels.cpu.weight_products import MAX_ROWS, in_lane_order, multiply
from offload.zero.groups.layout import QuantizedPart
from offload.zero.groups.weight_quantizer import WeightQuantizer, split_codes

# Operations whose result is no view of what they read (`float` of other dtypes), and that write to
# none of it.
_PURE = frozenset(
    {
        "linear", "rms_norm", "layer_norm", "mul", "__mul__", "__rmul__", "add", "__add__",
        "__radd__", "float",
    }
)  # fmt: skip


@dataclass(frozen=True)
class StoredParam:
    """A parameter in its group's stored bytes."""

    part: QuantizedPart
    stored: torch.Tensor  # its own bytes, 1D uint8 in host memory; kept while there is a view
    quantizer: WeightQuantizer
    dtype: torch.dtype

    def plain(self) -> torch.Tensor:
        """Return the values of a parameter that is stored as it is."""
        return self.stored.view(self.dtype).view(self.part.spec.shape)


Find = Callable[[Any], StoredParam | None]


def compute(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any],
    find: Find,
) -> Any:  # fmt: skip
    """Return the result of `function` for released parameters that `find` knows; NotImplemented if
    it takes their dequantized values. Gradients are not recorded meanwhile."""
    if function is functional.embedding:
        return _embedding(*args, **kwargs, find=find)
    if function is functional.linear:
        product = _linear(*args, **kwargs, find=find)
        if product is not NotImplemented:
            return product
    if name not in _PURE or "out" in kwargs:
        return NotImplemented
    values = [*args, *kwargs.values()]
    params = [find(value) for value in values]
    views = name == "float"  # of fp32
    for each in params:
        if each and (each.part.weights or (views and each.dtype is torch.float32)):
            return NotImplemented
    values = [each.plain() if each else value for value, each in zip(values, params, strict=True)]
    return function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))


def _linear(
    input: torch.Tensor, weight: Any, bias: Any = None, *, find: Find,  # noqa: A002
) -> Any:  # fmt: skip
    """Compute `torch.nn.functional.linear`, whose argument names these are, of few tokens. Sums and
    bias are added in fp32 and rounded once."""
    stored, stored_bias = find(weight), find(bias)
    if stored is None or stored.part.weights is None or type(input) is not torch.Tensor:
        return NotImplemented
    if (stored_bias and stored_bias.part.weights) or torch.is_autocast_enabled("cpu"):
        return NotImplemented
    weights, spec = stored.part.weights, stored.part.spec
    # the parameter's own shape would be asked of the released one, which takes longer
    columns, inner = spec.shape if len(spec.shape) == 2 else (0, 0)
    fits = inner % weights.group_size == 0 and 0 < input.numel() <= MAX_ROWS * inner
    if not fits or input.shape[-1:] != (inner,):  # an error of PyTorch's, if any
        return NotImplemented
    if (input.dtype, input.device) != (stored.dtype, stored.stored.device):
        return NotImplemented
    x = input.detach().reshape(-1, inner).float().numpy()
    words, codes, _ = split_codes(stored.stored, weights, spec.numel)
    out = torch.empty(len(x), columns)
    multiply(
        in_lane_order(x, weights), words.numpy().view(np.uint32), codes.numpy(), out.numpy(),
        weights, stored.quantizer.kind, stored.quantizer.runner(stored.part),
    )  # fmt: skip
    if bias is not None:
        out += bias if stored_bias is None else stored_bias.plain()
    return out.to(input.dtype).view(*input.shape[:-1], columns)


def _embedding(
    input: torch.Tensor, weight: Any, padding_idx: int | None = None,  # noqa: A002
    max_norm: float | None = None, *rest: Any, find: Find, **others: Any,
) -> Any:  # fmt: skip
    """Compute `torch.nn.functional.embedding`, whose argument names these are."""
    stored = find(weight)
    if stored is None or stored.part.weights is None or max_norm is not None:
        return NotImplemented
    rows, row = stored.part.spec.shape
    if row % stored.part.weights.group_size or input.numel() >= rows:
        return NotImplemented
    flat = input.reshape(-1).long()
    if input.dtype not in (torch.int64, torch.int32) or not ((flat >= 0) & (flat < rows)).all():
        return NotImplemented  # an error of PyTorch's
    words, codes, _ = split_codes(stored.stored, stored.part.weights, stored.part.spec.numel)
    words, codes = (each.view(rows, -1)[flat].reshape(-1) for each in (words, codes))
    out = torch.empty(len(flat), row, dtype=stored.dtype)
    dequantize_weights(
        words.numpy().view(np.uint32), codes.numpy(), flat_array(out), stored.part.weights,
        stored.quantizer.kind,
    )  # fmt: skip
    return out.view(*input.shape, row)
