"""Weights in 8 and 4 bits, dequantized in device memory to the bits of `cpu/quantization.py`.

What travels to a GPU is codes; they are made on the CPU.
"""

import torch

from offload.kernels.gpu.triton_launch import check, float_of, launch, loaded, numel_of
from offload.kernels.weight_formats import WeightFormat

_BLOCK = 2048  # elements per program, whole groups
_WARPS = 8


def dequantize_weights(
    words: torch.Tensor, codes: torch.Tensor, values: torch.Tensor, weights: WeightFormat
) -> None:
    """Fill `values` (numel,) from int32 `words` (groups,) and uint8 `codes`, as `quantize_weights`
    of the CPU wrote them."""
    numel = numel_of("values", values)
    groups, rest = divmod(numel, weights.group_size)
    if rest:
        raise ValueError(f"values: {numel} elements are no whole groups of {weights.group_size}")
    kind = float_of("values", values)
    check("values", values, values.dtype, numel, values)
    check("words", words, torch.int32, groups, values)
    check("codes", codes, torch.uint8, weights.codes_nbytes(numel), values)
    constants = (int(weights.quant_type), int(kind), weights.group_size, _BLOCK)
    kernel, programs = loaded("triton_dequantize_kernel", "dequantize_kernel"), -(-numel // _BLOCK)
    launch(kernel, programs, (values, words, codes), (groups,), constants, _WARPS)
