"""FP8, e4m3: transformers' format `fp8` (DeepSeek and Qwen write it) and `fbgemm_fp8`.

              fp8                                    fbgemm_fp8
    weight    M.weight                               M.weight
    scales    M.weight_scale_inv                     M.weight_scale [rows, 1]
              of blocks of `weight_block_size`,
              or of the whole weight

The last blocks may have fewer rows and columns. Packed experts have one dimension more, and their
scales are E_scale_inv. Scales of one byte are exponents. A value is code x scale in fp32.

`mxfp4` (gpt-oss) are packed experts in FP4, e2m1, a scale for each 32:

    E_blocks  uint8 [experts, rows, groups, 16]: two codes, the low bits first
    E_scales  uint8 [experts, rows, groups]: exponents, less 127

A value is rounded to bf16; the model has the columns first.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.quantized.matrix import Matrix, Scaled, Stack, e2m1
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


def mxfp4(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    return {name: _experts(name, parts) for name in parts.modules("_blocks")}


def _experts(name: str, parts: Parts) -> Matrix:
    if name in parts.left:
        raise damaged(parts.left[name], "is there quantized as well")
    codes = parts.take(f"{name}_blocks", (torch.uint8,), (None, None, None, 16), name)
    experts, rows, groups, _ = codes.shape
    scale = parts.take(f"{name}_scales", (torch.uint8,), (experts, rows, groups), name)
    each: list[Matrix] = [
        Scaled(
            torch.bfloat16, (rows, groups * 32), codes.row(i), e2m1, (1, 32),
            partial(_powers, scale.row(i)),
        ) for i in range(experts)
    ]  # fmt: skip
    return Stack.of(each, transposed=True)


def _powers(scale: Stored) -> Tensor:
    return torch.pow(2.0, scale.read().int() - 127)
