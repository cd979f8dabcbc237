"""Quantized weights as other libraries write them, packed one code at a time, and their values by
the formats' documented formulas, in plain numpy and torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.quantized.bitsandbytes import NF4

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Random = torch.Generator


@dataclass
class Weight:
    """The parts of a weight by the ends of their names, and its values."""

    parts: dict[str, Tensor]
    value: Tensor


@dataclass
class Format:
    """A format with one of its settings."""

    settings: dict[str, Any]
    make: Any  # (rows, columns, generator) -> Weight


def words(codes: np.ndarray[Any, Any], bits: int) -> Tensor:
    """int32 words of codes [n, m], along the last dimension."""
    per_word = 32 // bits
    n, m = codes.shape
    words = np.zeros((n, -(-m // per_word)), dtype=np.uint32)
    for column in range(m):
        place = np.uint32(column % per_word * bits)
        words[:, column // per_word] |= codes[:, column].astype(np.uint32) << place
    return torch.from_numpy(words.view(np.int32))


def product(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """(code - zero) x scale, each product rounded once to the scales' format."""
    return ((codes.double() - zeros.double()) * scales.double()).to(scales.dtype)


def randint(high: int, shape: tuple[int, ...], random: Random) -> Tensor:
    return torch.randint(high, shape, generator=random)


def positive(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> Tensor:
    return (torch.rand(shape, generator=random) / 8 + 1e-3).to(dtype)


# ------------------------------------------------------------------------- compressed-tensors
def compressed(
    bits: int = 4, *, symmetric: bool = True, strategy: str = "group", group_size: int = 16,
    dtype: torch.dtype = torch.bfloat16, order: bool = False,
) -> Format:  # fmt: skip
    weights: dict[str, Any] = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": group_size if strategy == "group" else None,
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip

    def make(rows: int, columns: int, random: Random) -> Weight:
        groups = columns // group_size if strategy == "group" else 1
        half = 1 << (bits - 1)
        codes = randint(2 * half, (rows, columns), random) - half
        zeros = randint(2 * half, (rows, groups), random) - half
        if symmetric:
            zeros = torch.zeros_like(zeros)
        scale = positive((rows, groups), dtype, random)
        of = torch.arange(columns) // (columns // groups)
        parts = {
            "weight_packed": words((codes + half).numpy(), bits),
            "weight_shape": torch.tensor([rows, columns]), "weight_scale": scale,
        }  # fmt: skip
        if order:
            of = of[torch.randperm(columns, generator=random)]
            parts["weight_g_idx"] = of.int()
        if not symmetric:
            parts["weight_zero_point"] = words((zeros + half).t().numpy(), bits).t().contiguous()
        return Weight(parts, product(codes, zeros[:, of], scale[:, of]))

    return Format(settings, make)


def plain_codes(
    kind: str = "float", strategy: str = "channel", *, symmetric: bool = True,
    size: tuple[int, int] = (1, 64), dtype: torch.dtype = torch.bfloat16,
) -> Format:  # fmt: skip
    """Codes of 8 bits, each in a byte, with a scale for each block of `size`."""
    weights: dict[str, Any] = {
        "num_bits": 8, "type": kind, "symmetric": symmetric, "strategy": strategy,
        "group_size": size[1] if strategy == "group" else None,
        "block_structure": list(size) if strategy == "block" else None,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights}
    settings = {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "ignore": ["lm_head"],
        "config_groups": {"g": group | {"input_activations": {"num_bits": 8, "dynamic": True}}},
    }  # fmt: skip

    def make(rows: int, columns: int, random: Random) -> Weight:
        block = (rows, columns) if strategy == "tensor" else size
        codes, scale, of = blocks((rows, columns), block, dtype, random)
        zero = torch.zeros(scale.shape)
        if kind == "int":
            codes = (randint(256, (rows, columns), random) - 128).to(torch.int8)
        parts = {"weight": codes, "weight_scale": scale.flatten() if scale.numel() == 1 else scale}
        if not symmetric:
            zero = randint(256, tuple(scale.shape), random) - 128
            parts["weight_zero_point"] = zero.to(torch.int8)
        return Weight(parts, product(codes, zero[of], scale[of]))

    return Format(settings, make)


def four_bit_floats(size: int, *, symmetric: bool = True) -> Format:
    """FP4, in groups of 16 with another scale for all (nvfp4), or of 32 (mxfp4)."""
    strategy = "tensor_group" if size == 16 else "group"
    weights = {
        "num_bits": 4, "type": "float", "symmetric": symmetric, "strategy": strategy,
        "group_size": size,
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"],
        "format": f"{'nv' if size == 16 else 'mx'}fp4-pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def make(rows: int, columns: int, random: Random) -> Weight:
        codes = randint(16, (rows, columns), random)
        octets = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        numbers = table[codes % 8] * (1 - 2 * (codes // 8))
        numbers[codes == 8] = -0.0
        if size == 16:
            small = (positive((rows, columns // 16), torch.float32, random) * 99).to(
                torch.float8_e4m3fn
            )
            over = torch.tensor([37.7])
            parts, scale = (
                {"weight_scale": small, "weight_global_scale": over},
                small.float() / over,
            )
        else:
            exponents = randint(40, (rows, columns // 32), random) + 100
            scale = 2.0 ** (exponents.float() - 127)
            parts = {"weight_scale": exponents.to(torch.uint8)}
        values = (numbers * scale.repeat_interleave(size, 1)).bfloat16()
        return Weight({"weight_packed": octets, **parts}, values)

    return Format(settings, make)


def blocks(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, random: Random
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """e4m3 codes of every kind but NaN, scales of blocks, and the block of each element."""
    codes = randint(256, shape, random)
    codes = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    rows, columns = (torch.arange(n) // size for n, size in zip(shape, block, strict=True))
    scale = positive((int(rows[-1]) + 1, int(columns[-1]) + 1), dtype, random)
    return codes, scale, (rows[:, None], columns[None])


def fp8(method: str = "fp8", block: tuple[int, int] | None = (16, 48)) -> Format:
    settings = {
        "quant_method": method, "activation_scheme": "dynamic",
        "weight_block_size": block and list(block),
    }  # fmt: skip

    def make(rows: int, columns: int, random: Random) -> Weight:
        size = block or (rows, columns)
        codes, scale, of = blocks((rows, columns), size, torch.float32, random)
        stored = scale.reshape(()) if block is None else scale
        end = "weight_scale_inv" if method == "fp8" else "weight_scale"
        return Weight({"weight": codes, end: stored}, codes.float() * scale[of])

    return Format(settings, make)


# -------------------------------------------------------------------------------- GPTQ and AWQ
def gptq(
    bits: int = 4, *, version: int = 1, group_size: int = 16, desc_act: bool = False,
    g_idx: bool = True, dtype: torch.dtype = torch.float16,
) -> Format:  # fmt: skip
    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act,
        "sym": False, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip

    def make(rows: int, columns: int, random: Random) -> Weight:
        groups = columns // group_size if group_size > 0 else 1
        codes = randint(1 << bits, (columns, rows), random)
        zeros = randint((1 << bits) - 1, (groups, rows), random) + 1
        scales = positive((groups, rows), dtype, random)
        of = torch.arange(columns) // (columns // groups)
        if desc_act:
            of = of[torch.randperm(columns, generator=random)]
        parts = {
            "qweight": words(codes.t().numpy(), bits).t().contiguous(),
            "qzeros": words((zeros - int(version == 1)).numpy(), bits), "scales": scales,
        }  # fmt: skip
        if g_idx:
            parts["g_idx"] = of.int()
        return Weight(parts, product(codes, zeros[of], scales[of]).t().contiguous())

    return Format(settings, make)


def awq(group_size: int = 16, dtype: torch.dtype = torch.float16) -> Format:
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm",
        "zero_point": True, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip

    def interleaved(codes: Tensor) -> Tensor:
        n, m = codes.shape
        return words(codes.reshape(n, m // 8, 8)[:, :, AWQ_ORDER].reshape(n, m).numpy(), 4)

    def make(rows: int, columns: int, random: Random) -> Weight:
        groups = columns // group_size if group_size > 0 else 1
        codes = randint(16, (columns, rows), random)
        zeros = randint(16, (groups, rows), random)
        scales = positive((groups, rows), dtype, random)
        of = torch.arange(columns) // (columns // groups)
        parts = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales}
        return Weight(parts, product(codes, zeros[of], scales[of]).t().contiguous())

    return Format(settings, make)


# -------------------------------------------------------------------------------- bitsandbytes
def four_bits(
    *, nested: bool = False, block: int = 64, dtype: torch.dtype = torch.bfloat16,
) -> Format:  # fmt: skip
    settings = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
    }  # fmt: skip
    table = torch.tensor(NF4)

    def make(rows: int, columns: int, random: Random) -> Weight:
        numel = rows * columns
        blocks = -(-numel // block)
        codes = randint(16, (numel + numel % 2,), random)
        absmax = positive((blocks,), torch.float32, random)
        state = {
            "quant_type": "nf4", "blocksize": block, "dtype": str(dtype).removeprefix("torch."),
            "shape": [rows, columns],
        }  # fmt: skip
        parts = {
            "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
            "weight.absmax": absmax, "weight.quant_map": table.clone(),
        }  # fmt: skip
        if nested:
            inner = randint(256, (blocks,), random).to(torch.uint8)
            outer = positive((-(-blocks // 256),), torch.float32, random)
            values = torch.linspace(-1, 1, 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            parts |= {
                "weight.absmax": inner, "weight.nested_absmax": outer,
                "weight.nested_quant_map": values,
            }  # fmt: skip
            absmax = values[inner.int()] * outer.repeat_interleave(256)[:blocks] + 0.0625
        said = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(said), dtype=torch.uint8)
        values = table[codes[:numel]] * absmax.repeat_interleave(block)[:numel]
        return Weight(parts, values.to(dtype).reshape(rows, columns))

    return Format(settings, make)


FORMATS: dict[str, Format] = {
    "ct int4": compressed(),
    "ct int8": compressed(8),
    "ct int4, asymmetric": compressed(symmetric=False),
    "ct int8, asymmetric, fp16": compressed(8, symmetric=False, dtype=torch.float16),
    "ct int4, asymmetric, fp32": compressed(symmetric=False, dtype=torch.float32),
    "ct int4, channels": compressed(strategy="channel"),
    "ct int8, channels, asymmetric": compressed(8, strategy="channel", symmetric=False),
    "ct int4, groups in any order": compressed(symmetric=False, order=True),
    "ct fp8": plain_codes(),
    "ct fp8, one scale, fp32": plain_codes(strategy="tensor", dtype=torch.float32),
    "ct fp8, blocks": plain_codes(strategy="block", size=(16, 48)),
    "ct fp8, groups": plain_codes(strategy="group", size=(1, 16)),
    "ct int8, bytes": plain_codes("int"),
    "ct int8, bytes, asymmetric, fp16": plain_codes("int", symmetric=False, dtype=torch.float16),
    "ct nvfp4": four_bit_floats(16),
    "ct mxfp4": four_bit_floats(32),
    "fp8": fp8(),
    "fp8, one scale": fp8(block=None),
    "fbgemm": fp8("fbgemm_fp8", (1, 1 << 20)),
    "gptq": gptq(),
    "gptq without g_idx": gptq(g_idx=False),
    "gptq in one group": gptq(group_size=-1),
    "gptq v2": gptq(version=2),
    "gptq 8 bits": gptq(8),
    "gptq v2, 8 bits, bf16": gptq(8, version=2, dtype=torch.bfloat16),
    "gptq desc_act": gptq(desc_act=True),
    "awq": awq(),
    "awq in one group": awq(-1),
    "nf4": four_bits(),
    "nf4 nested": four_bits(nested=True),
    "nf4 fp16, nested": four_bits(nested=True, dtype=torch.float16),
    "nf4 fp32": four_bits(dtype=torch.float32, block=128),
}
