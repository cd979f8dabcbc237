"""FP8, e4m3: transformers' format `fp8` (DeepSeek and Qwen write it) and `fbgemm_fp8`.

              fp8                                    fbgemm_fp8
    weight    M.weight                               M.weight
    scales    M.weight_scale_inv                     M.weight_scale [rows, 1]
              of blocks of `weight_block_size`,
              or of the whole weight

The last blocks may have fewer rows and columns. Packed experts have one dimension more, and their
scales are E_scale_inv. Scales of one byte are exponents. A value is code x scale in fp32.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.quantized.matrix import Matrix, Scaled, Stack
from offload.quantized.parts import FLOAT8, FLOATS, Parts, damaged, pair_of, warn_of_activations
from offload.weights.tensor_file import Stored

_SCALES = (*FLOATS, torch.uint8)


def fp8(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    size = settings.get("weight_block_size")
    block = None if size is None else pair_of(size, "weight_block_size")
    return _matrices("_scale_inv", block, parts)


def fbgemm(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    return _matrices("_scale", (1, 1 << 31), parts)


def _matrices(ending: str, block: tuple[int, int] | None, parts: Parts) -> dict[str, Matrix]:
    parts.drop("activation_scale", ".input_scale", ".input_scale_ub")
    warn_of_activations()
    names = [name for name in parts.left if f"{name}{ending}" in parts.left]
    return {name: _matrix(name, f"{name}{ending}", block, parts) for name in names}


def _matrix(name: str, of_scales: str, block: tuple[int, int] | None, parts: Parts) -> Matrix:
    ndim = len(parts.left[name].shape)
    if ndim not in (2, 3):
        raise damaged(parts.left[name], f"has {ndim} dimensions, and a scale")
    codes = parts.take(name, FLOAT8, (None,) * ndim, name)
    rows, columns = codes.shape[-2:]
    block = (rows, columns) if block is None else block
    scale = parts.scales(of_scales, codes.shape, block, name, _SCALES)
    if ndim == 2:
        return _scaled(codes, scale, block)
    return Stack.of([_scaled(codes.row(i), scale.row(i), block) for i in range(codes.shape[0])])


def _scaled(codes: Stored, scale: Stored, block: tuple[int, int]) -> Matrix:
    read = partial(_read_scale, scale)
    return Scaled(torch.float32, codes.shape, codes, Tensor.float, block, read)


def _read_scale(scale: Stored) -> Tensor:
    values = scale.read()
    return (values.float() - 127).exp2() if values.dtype == torch.uint8 else values.float()
