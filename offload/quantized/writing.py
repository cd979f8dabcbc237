"""Weights in the formats of other libraries: quantized by `kernels.cpu.quantization`, as `storage`
keeps them at home, in another packing.

    int4    compressed-tensors    groups, asymmetric    (code - zero) x scale
    int8    compressed-tensors    groups, symmetric     code x scale
    nf4     bitsandbytes NF4                            level x absmax

All three formulas are the kernels' own. A scale of int4 has 7 bits, so that 16-bit formats hold it;
one of int8 has 17: int8 weights of 16 bits have other scales, with codes for those. Experts in int4
are symmetric: transformers, which packs them, reads no zero points of theirs.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.kernels.bits import FLOAT_OF, array_of
from offload.kernels.cpu.quantization import quantize_weights
from offload.kernels.floats import Array
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.quantized import bitsandbytes, compressed_tensors
from offload.quantized.matrix import Grouped, packed, piece_rows, unpacked
from offload.tiers.errors import CheckpointError, ConfigError

# whose files hold which format
LIBRARIES = {
    QuantType.INT8: "compressed-tensors", QuantType.INT4: "compressed-tensors",
    QuantType.NF4: "bitsandbytes",
}  # fmt: skip


def weight_format(storage: str, group_size: int) -> WeightFormat:
    """Return the format of this name. Raise ConfigError for one that no file holds."""
    names = [each.name.lower() for each in LIBRARIES]
    if storage not in names:
        raise ConfigError(f"storage: expected one of {', '.join(names)}, got {storage!r:.40}")
    try:
        return WeightFormat(QuantType[storage.upper()], group_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def is_symmetric(weights: WeightFormat, *, expert: bool) -> bool:
    quant_type = weights.quant_type
    return quant_type is QuantType.INT8 or (expert and quant_type is QuantType.INT4)


def described(
    name: str, tensor: Tensor, weights: WeightFormat, *, expert: bool
) -> dict[str, Tensor]:
    """Return the parts of a weight, on the meta device, by the ends of their names (after the
    module's). Raise ConfigError for a weight that cannot be stored so."""
    why = weights.refusal(tensor.shape)
    if why is None and tensor.dtype not in FLOAT_OF:
        why = f"it is {tensor.dtype}"
    if why is not None:
        raise ConfigError(
            f"{name} cannot be stored in {weights.name}: {why}; name another group size, or skip it"
        )
    rows, columns = tensor.shape
    groups = columns // weights.group_size
    with torch.device("meta"):
        if weights.quant_type is QuantType.NF4:
            numel = tensor.numel()
            octets = torch.empty(numel // 2, dtype=torch.uint8)
            absmax = torch.empty(numel // weights.group_size)
            parts = bitsandbytes.pack(octets, absmax, tensor.shape, tensor.dtype)
        else:
            bits = weights.quant_type.bits
            zeros = torch.empty(rows, groups, dtype=torch.uint8)
            parts = compressed_tensors.pack(Grouped(
                bits, torch.empty(rows, columns * bits // 32, dtype=torch.int32),
                torch.empty(rows, groups, dtype=tensor.dtype),
                None if is_symmetric(weights, expert=expert) else zeros,
            ))  # fmt: skip
    return {end: part.to("meta") for end, part in parts.items()}


def quantize(
    name: str, tensor: Tensor, weights: WeightFormat, *, expert: bool
) -> dict[str, Tensor]:
    """Return the same with values. Raise CheckpointError for values that the format cannot hold."""
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite, and is not quantized")
    dtype = tensor.dtype
    if is_symmetric(weights, expert=expert) and not (
        weights.quant_type is QuantType.INT8 and dtype == torch.float32
    ):
        return compressed_tensors.pack(_symmetric(name, tensor, weights, dtype))
    words, codes = _quantized(tensor, weights)
    octets = torch.from_numpy(codes)
    if weights.quant_type is QuantType.NF4:
        return bitsandbytes.pack(octets, _floats(words), tensor.shape, tensor.dtype)
    rows = len(tensor)
    if weights.quant_type is QuantType.INT8:
        octets ^= 0x80  # from a sign to an offset of 128
        scale = _floats(words).view(rows, -1)
        return compressed_tensors.pack(
            Grouped(8, octets.view(torch.int32).view(rows, -1), scale, None)
        )
    zeros = torch.from_numpy((words & 15).astype(np.uint8)).view(rows, -1)
    scale = _floats(words & np.uint32(0xFFFFFFF0)).view(rows, -1)
    made = Grouped(4, octets.view(torch.int32).view(rows, -1), scale, zeros)
    return compressed_tensors.pack(_in_format(name, made, dtype))


def _quantized(tensor: Tensor, weights: WeightFormat) -> tuple[Array, Array]:
    """Return the words of groups and codes, as `storage` has them."""
    words = np.empty(tensor.numel() // weights.group_size, dtype=np.uint32)
    codes = np.empty(weights.codes_nbytes(tensor.numel()), dtype=np.uint8)
    kind = FLOAT_OF[tensor.dtype]
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    quantize_weights(array_of(flat, kind), words, codes, weights, kind)
    return words, codes


def _symmetric(name: str, tensor: Tensor, weights: WeightFormat, dtype: torch.dtype) -> Grouped:
    """Quantize a tensor with scales in `dtype`, rounded up, so that no code leaves -7 .. 7 or
    -127 .. 127. The smallest scale of fp16 leaves few codes to groups of small values; fewer than
    half of the codes are refused."""
    pieces = [
        _symmetric_rows(rows, weights, dtype) for rows in tensor.split(piece_rows(tensor.shape[1]))
    ]
    exact, scale, words = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    largest = scale.float() * ((1 << (weights.quant_type.bits - 1)) - 1)
    lost = (scale > 2 * exact) | (largest > torch.finfo(dtype).max)
    _refuse_scales(name, exact, lost, dtype)
    return Grouped(weights.quant_type.bits, words, scale, None)


def _symmetric_rows(
    rows: Tensor, weights: WeightFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales in fp32 and in `dtype`, and packed codes."""
    half = 1 << (weights.quant_type.bits - 1)
    values = rows.unflatten(1, (-1, weights.group_size)).float()
    exact = values.abs().amax(-1) / (half - 1)
    scale = exact.to(dtype)
    if dtype != torch.float32:
        low = scale.float() < exact
        scale = torch.where(low, (scale.view(torch.int16) + 1).view(dtype), scale)
    divisor = torch.where(scale > 0, scale, 1).float()
    codes = (values / divisor[..., None]).round_().to(torch.int16) + half
    return exact, scale, packed(codes.flatten(1).to(torch.uint8), weights.quant_type.bits)


def _in_format(name: str, made: Grouped, dtype: torch.dtype) -> Grouped:
    """Convert the scales to `dtype`, the format of the computed values."""
    scale = made.scale.to(dtype)
    lost = (scale.float() != made.scale) | (made.scale * 15 > torch.finfo(dtype).max)
    if bool(lost.any()):
        # of a group of zeros the scale does not matter
        assert made.zeros is not None, "of 4 bits"
        codes = unpacked(made.words, 4).flatten(1).unflatten(1, (lost.shape[1], -1))
        lost &= (codes != made.zeros[..., None]).any(-1)
    _refuse_scales(name, made.scale, lost, dtype)
    return Grouped(4, made.words, scale, made.zeros)


def _refuse_scales(name: str, scale: Tensor, lost: Tensor, dtype: torch.dtype) -> None:
    if bool(lost.any()):
        raise CheckpointError(
            f"{name} has a group with scale {float(scale[lost][0]):g}, which {dtype} does not "
            "hold: the values would be others; write it in another format (nf4) or precision"
        )


def _floats(words: Array) -> Tensor:
    return torch.from_numpy(words.view(np.float32).copy())


def configuration(
    weights: WeightFormat, chosen: Collection[str], unquantized: Sequence[str], dtype: torch.dtype,
    *, experts: bool,
) -> Mapping[str, Any]:  # fmt: skip
    """Return `quantization_config` of a folder, from the quantized linear layers, and the others.
    `experts`: with the experts that transformers packs."""
    if weights.quant_type is QuantType.NF4:
        skipped = [_pattern(name, chosen) for name in unquantized]
        return bitsandbytes.configuration(dtype, skipped)
    return compressed_tensors.configuration(
        weights.quant_type.bits, weights.group_size, unquantized,
        symmetric=is_symmetric(weights, expert=False), experts=experts,
    )  # fmt: skip


def _pattern(name: str, others: Collection[str]) -> str:
    """Return a pattern that matches this name only: transformers compares the beginnings and the
    ends of names."""
    is_other = any(each.startswith(name) or each.endswith(name) for each in others)
    return f"{re.escape(name)}$" if is_other else name
