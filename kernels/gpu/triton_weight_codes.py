"""Weights in 8 and 4 bits in device memory: the twin, bit for bit, of `kernels.weight_codes`.

What travels to a GPU is codes, and they are decoded there.
"""

from __future__ import annotations

from functools import cache

import torch

from offload.kernels.gpu.triton_launch import Kernel, check, float_of, launch, loaded, numel_of
from offload.kernels.weight_formats import WeightFormat

_BLOCK = 2048  # elements per program, whole groups
_WARPS = 8
_ENCODE, _DECODE = range(2)


def encode_weights(
    values: torch.Tensor, words: torch.Tensor, codes: torch.Tensor, weights: WeightFormat
) -> None:
    """Encode `values` (numel,): int32 `words` (groups,), uint8 `codes`."""
    _run(_ENCODE, values, words, codes, weights)


def decode_weights(
    words: torch.Tensor, codes: torch.Tensor, values: torch.Tensor, weights: WeightFormat
) -> None:
    """Fill `values` (numel,) from what `encode_weights` wrote."""
    _run(_DECODE, values, words, codes, weights)


def _run(
    action: int, values: torch.Tensor, words: torch.Tensor, codes: torch.Tensor,
    weights: WeightFormat,
) -> None:  # fmt: skip
    numel = numel_of("values", values)
    groups, rest = divmod(numel, weights.group_size)
    if rest:
        raise ValueError(f"values: {numel} elements are no whole groups of {weights.group_size}")
    kind = float_of("values", values)
    check("values", values, values.dtype, numel, values)
    check("words", words, torch.int32, groups, values)
    check("codes", codes, torch.uint8, weights.codes_nbytes(numel), values)
    constants = (action, int(weights.code), int(kind), weights.group_size, _BLOCK)
    launch(_kernel(), -(-numel // _BLOCK), (values, words, codes), (groups,), constants, _WARPS)


@cache
def _kernel() -> Kernel:
    def code_kernel() -> Kernel:
        from offload.kernels.gpu.triton_weight_codes_kernel import code_kernel

        return code_kernel

    return loaded(code_kernel)
