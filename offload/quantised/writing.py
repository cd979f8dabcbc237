"""Weights in the formats of other libraries: the codes are those of `kernels.weight_codes`, which
`storage` keeps at home, in another packing.

    int4    compressed-tensors, GPTQ, AWQ    groups, asymmetric    (code - zero) x scale
    int8    compressed-tensors, GPTQ         groups, symmetric     code x scale
    nf4     bitsandbytes NF4                                       level x absmax

All three formulas are the kernels' own. A scale of int4 has 7 bits, so that 16-bit formats hold it;
one of int8 has 17. Where a format's scales have 16 bits, int8 has others, with codes for those: of
weights of 16 bits, and in GPTQ and AWQ, whose kernels know fp16 and bf16. Other codes have, too,

    experts in int4 of compressed-tensors    symmetric: transformers, which packs them, reads no
                                             zero points of theirs
    int4 of GPTQ, groups without a negative  codes 1 to 15: a zero point 0 is stored as 0 - 1, which
                                             libraries read in different ways
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.kernels.floats import Array, Float
from offload.kernels.weight_codes import decode_weights, encode_weights
from offload.kernels.weight_formats import GRID_STEP_BITS, Code, WeightFormat
from offload.quantised import awq, bitsandbytes, compressed_tensors, gptq
from offload.quantised.grouped import Grouped
from offload.quantised.matrix import packed, piece_rows, unpacked
from offload.tiers.errors import CheckpointError, ConfigError
from offload.zero.bits import array_of
from offload.zero.coded_layout import refusal

_KINDS = {
    torch.float32: Float.FP32, torch.bfloat16: Float.BF16, torch.float16: Float.FP16
}  # fmt: skip
_FORMATS = {
    "compressed-tensors": (Code.INT4, Code.INT8),
    "bitsandbytes": (Code.NF4,),
    "gptq": (Code.INT4, Code.INT8),
    "awq": (Code.INT4,),
}
_LEAST_SCALE = 2.0**-100
_ROWS = 32  # kernels of GPTQ and AWQ take so many at a time


@dataclass(frozen=True)
class Target:
    """The codes of weights, and the library whose format has them."""

    weights: WeightFormat
    library: str

    @staticmethod
    def of(storage: str, group_size: int, library: str | None) -> Target:
        """ConfigError for what there is not. `library`: None is the first one."""
        names = [code.name.lower() for code in Code]
        if storage not in names:
            raise ConfigError(f"storage: expected one of {', '.join(names)}, got {storage!r:.40}")
        code = Code[storage.upper()]
        if library is not None and library not in _FORMATS:
            known = ", ".join(_FORMATS)
            raise ConfigError(f"format: expected one of {known}, got {library!r:.40}")
        holds = [name for name, codes in _FORMATS.items() if code in codes]
        if library is not None and library not in holds:
            raise ConfigError(
                f"format: {library} holds no {storage}, {' and '.join(holds)} "
                f"{'do' if len(holds) > 1 else 'does'}"
            )
        try:
            weights = WeightFormat(code, group_size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if library == "awq" and group_size > awq.LARGEST_GROUP:
            raise ConfigError(
                f"group_size: awq has groups of {awq.LARGEST_GROUP} and less, got {group_size}"
            )
        return Target(weights, library or holds[0])

    @property
    def holds_experts(self) -> bool:
        """Whether experts that transformers packs are written in codes, each by itself."""
        return self.library != "bitsandbytes"

    @property
    def of_blocks_alone(self) -> bool:
        """Whether its libraries look for codes in the model's blocks only."""
        return self.library in ("gptq", "awq")

    def is_symmetric(self, *, expert: bool) -> bool:
        compressed = self.library == "compressed-tensors"
        return self.weights.code is Code.INT8 or (expert and compressed)

    def keeps_codes(self, dtype: torch.dtype, *, expert: bool) -> bool:
        """Whether weights of `dtype` that `storage` has in such codes keep their values."""
        if self.weights.code is Code.INT8:
            return self._scale_dtype(dtype) == torch.float32
        return self.library != "gptq" and not self.is_symmetric(expert=expert)

    def _scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wide = dtype == torch.float32 and self.of_blocks_alone
        return torch.float16 if wide else dtype


def described(
    name: str, tensor: Tensor, target: Target, *, expert: bool = False
) -> dict[str, Tensor]:
    """The parts that a weight becomes, on the meta device, by the ends of their names (behind the
    module's). ConfigError for a weight that cannot be stored so."""
    weights = target.weights
    why = refusal(tensor.shape, weights)
    if why is None and tensor.dtype not in _KINDS:
        why = f"it is {tensor.dtype}"
    if why is None and target.of_blocks_alone and tensor.shape[0] % _ROWS:
        why = f"kernels of {target.library} take {_ROWS} rows at a time, not {len(tensor)}"
    if why is not None:
        raise ConfigError(
            f"{name} cannot be stored in {weights.name}: {why}; name another group size, or skip it"
        )
    rows, columns = tensor.shape
    groups = columns // weights.group_size
    with torch.device("meta"):
        if weights.code is Code.NF4:
            numel = tensor.numel()
            octets = torch.empty(numel // 2, dtype=torch.uint8)
            absmax = torch.empty(numel // weights.group_size)
            found = bitsandbytes.pack(octets, absmax, tensor.shape, tensor.dtype)
        else:
            bits = weights.code.bits
            zeros = torch.empty(rows, groups, dtype=torch.uint8)
            found = _pack(target, Grouped(
                bits, torch.empty(rows, columns * bits // 32, dtype=torch.int32),
                torch.empty(rows, groups, dtype=target._scale_dtype(tensor.dtype)),
                None if target.is_symmetric(expert=expert) else zeros,
            ))  # fmt: skip
    return {end: part.to("meta") for end, part in found.items()}


def encoded(
    name: str, tensor: Tensor, target: Target, *, expert: bool = False
) -> dict[str, Tensor]:
    """The same with values. CheckpointError for values that the format cannot hold."""
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite, and is not quantised")
    weights, dtype = target.weights, target._scale_dtype(tensor.dtype)
    if target.is_symmetric(expert=expert) and not (
        weights.code is Code.INT8 and dtype == torch.float32
    ):
        return _pack(target, _symmetric(name, tensor, weights, dtype))
    words, codes = _codes(tensor, weights)
    octets = torch.from_numpy(codes)
    if weights.code is Code.NF4:
        return bitsandbytes.pack(octets, _floats(words), tensor.shape, tensor.dtype)
    rows = len(tensor)
    if weights.code is Code.INT8:
        octets ^= 0x80  # from a sign to an offset of 128
        scale = _floats(words).view(rows, -1)
        return _pack(target, Grouped(8, octets.view(torch.int32).view(rows, -1), scale, None))
    zeros = torch.from_numpy((words & 15).astype(np.uint8)).view(rows, -1)
    scale = _floats(words & np.uint32(0xFFFFFFF0)).view(rows, -1)
    made = Grouped(4, octets.view(torch.int32).view(rows, -1), scale, zeros)
    if target.library == "gptq":
        _leave_out_zero(tensor, made)
    return _pack(target, _in_format(name, made, dtype))


def _pack(target: Target, made: Grouped) -> dict[str, Tensor]:
    if target.library == "gptq":
        return gptq.pack(made)
    return awq.pack(made) if target.library == "awq" else compressed_tensors.pack(made)


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


def _symmetric(name: str, tensor: Tensor, weights: WeightFormat, dtype: torch.dtype) -> Grouped:
    """With scales in `dtype`, rounded up, so that no code leaves -7 .. 7 or -127 .. 127. The least
    scale of fp16 leaves groups of small values few codes: less than half of them is refused."""
    pieces = [
        _symmetric_rows(rows, weights, dtype) for rows in tensor.split(piece_rows(tensor.shape[1]))
    ]
    exact, scale, words = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    largest = scale.float() * ((1 << (weights.code.bits - 1)) - 1)
    lost = (scale > 2 * exact) | (largest > torch.finfo(dtype).max)
    _refuse_scales(name, exact, lost, dtype)
    return Grouped(weights.code.bits, words, scale, None)


def _symmetric_rows(
    rows: Tensor, weights: WeightFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales in fp32 and in `dtype`, and packed codes."""
    half = 1 << (weights.code.bits - 1)
    values = rows.unflatten(1, (-1, weights.group_size)).float()
    exact = values.abs().amax(-1) / (half - 1)
    scale = exact.to(dtype)
    if dtype != torch.float32:
        low = scale.float() < exact
        scale = torch.where(low, (scale.view(torch.int16) + 1).view(dtype), scale)
    divisor = torch.where(scale > 0, scale, 1).float()
    codes = (values / divisor[..., None]).round_().to(torch.int16) + half
    return exact, scale, packed(codes.flatten(1).to(torch.uint8), weights.code.bits)


def _leave_out_zero(tensor: Tensor, made: Grouped) -> None:
    """Groups with zero point 0, which have no negative code, get 1, and 15 steps for their largest
    value."""
    assert made.zeros is not None, "it is not symmetric"
    here = made.zeros == 0
    values = tensor.unflatten(1, (-1, made.group_size))[here].float()
    if not values.numel():
        return
    steps = (values.amax(-1) / 14).clamp_min(_LEAST_SCALE).view(torch.int32)
    scale = ((steps + GRID_STEP_BITS - 1) // GRID_STEP_BITS * GRID_STEP_BITS).view(torch.float32)
    codes = ((values / scale[:, None]).round_() + 1).clamp_(0, 15).to(torch.uint8)
    made.words.unflatten(1, (here.shape[1], -1))[here] = packed(codes, 4)
    made.scale[here], made.zeros[here] = scale, 1


def _in_format(name: str, made: Grouped, dtype: torch.dtype) -> Grouped:
    """With scales in `dtype`, which is that of the values that are computed."""
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
    target: Target, chosen: Collection[str], unquantised: Sequence[str], dtype: torch.dtype, *,
    experts: bool,
) -> dict[str, Any]:  # fmt: skip
    """`quantization_config` of a folder: of linear layers that are in codes, and others. `experts`:
    of those that transformers packs, too."""
    code, group_size = target.weights.code, target.weights.group_size
    if target.library == "gptq":
        found = gptq.configuration(code.bits, group_size, chosen, unquantised)
    elif target.library == "compressed-tensors":
        found = compressed_tensors.configuration(
            code.bits, group_size, unquantised, symmetric=code is Code.INT8, experts=experts
        )
    else:
        skipped = [_pattern(name, chosen) for name in unquantised]
        if target.library == "awq":
            found = awq.configuration(group_size, skipped)
        else:
            found = bitsandbytes.configuration(dtype, skipped)
    return dict(found)


def _pattern(name: str, others: Collection[str]) -> str:
    """transformers takes a name for a pattern of the beginnings of names, or for an end of one."""
    is_other = any(each.startswith(name) or each.endswith(name) for each in others)
    return f"{re.escape(name)}$" if is_other else name
