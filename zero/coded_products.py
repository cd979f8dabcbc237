"""Linear layers straight from their codes: for few tokens, where to decode costs more."""

from __future__ import annotations

import math

import numpy as np
import torch

from offload.kernels.floats import Runner, serial
from offload.kernels.weight_products import MOST_ROWS, in_lane_order, multiply
from offload.zero.bits import FLOAT_OF
from offload.zero.coded_layout import CodedPart
from offload.zero.weight_codes import split_codes


def pays(x: torch.Tensor, part: CodedPart) -> bool:
    """Whether `linear` takes less time for `x` than decoding and `torch.nn.functional.linear`.

    That depends on the shape of `x` alone, not on where the codes live: the two ways have different
    bits, since they add up in another order.
    """
    rows = math.prod(x.shape[:-1])
    return part.weights is not None and len(part.spec.shape) == 2 and 0 < rows <= MOST_ROWS


def linear(
    x: torch.Tensor, stored: torch.Tensor, part: CodedPart, bias: torch.Tensor | None = None,
    run: Runner = serial,
) -> torch.Tensor:  # fmt: skip
    """`torch.nn.functional.linear(x, weight, bias)`, where `stored` (uint8) has the codes of a
    weight of `x`'s dtype. x (..., in_features), on the CPU; sums and bias are added in fp32 and
    rounded once. Records nothing for backward.

    `run` shares ranges of the weight's rows among threads. ValueError where shapes do not fit.
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
