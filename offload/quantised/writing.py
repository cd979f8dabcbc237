"""Weights in the formats of other libraries: the codes are those of `kernels.weight_codes`, which
`storage` keeps at home, in another packing.

    int4    compressed-tensors, groups, asymmetric    (code - zero) x scale
    int8    compressed-tensors, groups, symmetric     code x scale
    nf4     bitsandbytes NF4                          level x absmax

All three formulas are the kernels' own. A scale of int4 has 7 bits, so that 16-bit formats hold it;
one of int8 has 17: weights of 16 bits have others in int8, with codes for those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.kernels.floats import Array, Float
from offload.kernels.weight_codes import decode_weights, encode_weights
from offload.kernels.weight_formats import Code, WeightFormat
from offload.quantised.bitsandbytes import NF4, STATE
from offload.quantised.compressed_tensors import FORMAT
from offload.quantised.matrix import packed, piece_rows
from offload.tiers.errors import CheckpointError, ConfigError
from offload.zero.bits import array_of
from offload.zero.coded_layout import refusal

_KINDS = {
    torch.float32: Float.FP32, torch.bfloat16: Float.BF16, torch.float16: Float.FP16
}  # fmt: skip
_SPELT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def described(name: str, tensor: Tensor, weights: WeightFormat) -> dict[str, Tensor]:
    """The parts that a weight becomes, on the meta device, by the ends of their names (behind the
    module's). ConfigError for a weight that cannot be stored so."""
    why = refusal(tensor.shape, weights)
    if why is None and tensor.dtype not in _KINDS:
        why = f"it is {tensor.dtype}"
    if why is not None:
        raise ConfigError(
            f"{name} cannot be stored in {weights.code.name.lower()}: {why}; name another group "
            "size, or skip it"
        )
    rows, columns = tensor.shape
    groups = columns // weights.group_size
    with torch.device("meta"):
        if weights.code is Code.NF4:
            numel = tensor.numel()
            return {
                "weight": torch.empty(numel // 2, 1, dtype=torch.uint8),
                "weight.absmax": torch.empty(numel // weights.group_size),
                "weight.quant_map": torch.empty(16),
                f"{STATE}nf4": torch.empty(len(_state(tensor, weights)), dtype=torch.uint8),
            }
        words = columns * weights.code.bits // 32
        found = {
            "weight_packed": torch.empty(rows, words, dtype=torch.int32),
            "weight_shape": torch.empty(2, dtype=torch.int64),
            "weight_scale": torch.empty(rows, groups, dtype=_scale_dtype(tensor, weights)),
        }
        if weights.code is Code.INT4:
            zeros = torch.empty(-(-rows // 8), groups, dtype=torch.int32)
            found["weight_zero_point"] = zeros
        return found


def encoded(name: str, tensor: Tensor, weights: WeightFormat) -> dict[str, Tensor]:
    """The same with values. CheckpointError for values that the format cannot hold."""
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite, and is not quantised")
    rows, columns = tensor.shape
    if weights.code is Code.INT8 and tensor.dtype != torch.float32:
        return _int8_of_16_bits(tensor, weights)
    words, codes = _codes(tensor, weights)
    octets = torch.from_numpy(codes)
    if weights.code is Code.NF4:
        return {
            "weight": octets[:, None], "weight.absmax": _floats(words),
            "weight.quant_map": torch.tensor(NF4),
            f"{STATE}nf4": torch.frombuffer(_state(tensor, weights), dtype=torch.uint8),
        }  # fmt: skip
    found = {"weight_shape": torch.tensor([rows, columns])}
    if weights.code is Code.INT8:
        octets ^= 0x80  # from a sign to an offset of 128
        found["weight_scale"] = _floats(words).view(rows, -1)
    else:
        zeros = torch.from_numpy((words & 15).astype(np.uint8)).view(rows, -1)
        scale = _floats(words & np.uint32(0xFFFFFFF0)).view(rows, -1)
        found["weight_scale"] = _in_format(name, scale, octets.view(rows, -1), zeros, tensor.dtype)
        padded = torch.nn.functional.pad(zeros.t(), (0, -rows % 8))
        found["weight_zero_point"] = packed(padded, 4).t().contiguous()
    found["weight_packed"] = octets.view(torch.int32).view(rows, -1)
    return found


def _codes(tensor: Tensor, weights: WeightFormat) -> tuple[Array, Array]:
    """Words of groups and codes, as `storage` has them."""
    words = np.empty(tensor.numel() // weights.group_size, dtype=np.uint32)
    codes = np.empty(weights.codes_nbytes(tensor.numel()), dtype=np.uint8)
    kind = _KINDS[tensor.dtype]
    encode_weights(_array(tensor, kind), words, codes, weights, kind)
    return words, codes


def keeps(tensor: Tensor, weights: WeightFormat) -> bool:
    """Whether codes give a tensor's values back as they are."""
    words, codes = _codes(tensor, weights)
    kind = _KINDS[tensor.dtype]
    back = np.empty(tensor.numel(), dtype=kind.storage)
    decode_weights(words, codes, back, weights, kind)
    return bool(np.array_equal(back, _array(tensor, kind)))


def _array(tensor: Tensor, kind: Float) -> Array:
    return array_of(tensor.contiguous().view(-1).view(torch.uint8), kind)


def _int8_of_16_bits(tensor: Tensor, weights: WeightFormat) -> dict[str, Tensor]:
    """With scales in the weight's own format, to which transformers casts them: rounded up, so that
    no code leaves -127 .. 127."""
    pieces = [_int8_rows(rows, weights) for rows in tensor.split(piece_rows(tensor.shape[1]))]
    scale, codes = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return {
        "weight_shape": torch.tensor(tensor.shape), "weight_scale": scale, "weight_packed": codes
    }  # fmt: skip


def _int8_rows(rows: Tensor, weights: WeightFormat) -> tuple[Tensor, Tensor]:
    """Scales and packed codes."""
    values = rows.unflatten(1, (-1, weights.group_size)).float()
    exact = values.abs().amax(-1) / 127
    scale = exact.to(rows.dtype)
    low = scale.float() < exact
    scale = torch.where(low, (scale.view(torch.int16) + 1).view(rows.dtype), scale)
    divisor = torch.where(scale > 0, scale, 1).float()
    codes = (values / divisor[..., None]).round_().to(torch.int16) + 128
    return scale, packed(codes.flatten(1).to(torch.uint8), 8)


def _in_format(
    name: str, scale: Tensor, codes: Tensor, zeros: Tensor, dtype: torch.dtype
) -> Tensor:
    """Scales in the format of the weight, which is that of the values that are computed."""
    found = scale.to(dtype)
    lost = (found.float() != scale) | (scale * 15 > torch.finfo(dtype).max)
    if bool(lost.any()):
        # of a group of zeros the scale does not matter
        pairs = codes.view(*scale.shape, -1)
        lost &= (pairs != (zeros * 17)[..., None]).any(-1)
    if bool(lost.any()):
        raise CheckpointError(
            f"{name} has a group with scale {float(scale[lost][0]):g}, which {dtype} does not "
            "hold: the values would be others; write it in int8, nf4 or another precision"
        )
    return found


def _floats(words: Array) -> Tensor:
    return torch.from_numpy(words.view(np.float32).copy())


def _scale_dtype(tensor: Tensor, weights: WeightFormat) -> torch.dtype:
    return torch.float32 if weights.code is Code.NF4 else tensor.dtype


def _state(tensor: Tensor, weights: WeightFormat) -> bytearray:
    said = {
        "quant_type": "nf4", "blocksize": weights.group_size, "dtype": _SPELT[tensor.dtype],
        "shape": list(tensor.shape),
    }  # fmt: skip
    return bytearray(json.dumps(said).encode())


def settings(
    weights: WeightFormat, quantised: Collection[str], unquantised: Sequence[str],
    dtype: torch.dtype,
) -> Mapping[str, Any]:  # fmt: skip
    """`quantization_config` of a folder, for its linear layers."""
    if weights.code is Code.NF4:
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": _SPELT[dtype], "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": [_pattern(name, quantised) for name in unquantised],
        }  # fmt: skip
    stored = {
        "num_bits": weights.code.bits, "type": "int", "symmetric": weights.code is Code.INT8,
        "strategy": "group", "group_size": weights.group_size, "dynamic": False,
    }  # fmt: skip
    group = {
        "targets": ["Linear"], "weights": stored, "input_activations": None,
        "output_activations": None, "format": FORMAT,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": FORMAT,
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {"group_0": group}, "ignore": list(unquantised),
    }  # fmt: skip


def _pattern(name: str, others: Collection[str]) -> str:
    """transformers takes a name for a pattern of the beginnings of names, or for an end of one."""
    is_other = any(each.startswith(name) or each.endswith(name) for each in others)
    return f"{re.escape(name)}$" if is_other else name
