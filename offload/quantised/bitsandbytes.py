"""bitsandbytes: NF4 and FP4 (QLoRA, arXiv:2305.14314), and the int8 of LLM.int8() (2208.07339).

4 bits, of all elements in a row, in blocks:

    M.weight                                   two codes per byte, the first one in the high bits
    M.weight.absmax                            float32 [blocks]; or uint8, codes themselves:
    M.weight.nested_absmax, .nested_quant_map  ... float32 of blocks of those, and 256 values
    M.weight.quant_map                         the 16 values
    M.weight.quant_state.bitsandbytes__nf4     JSON: shape, dtype, block sizes, offset

A value is quant_map[code] x absmax in fp32, rounded to `dtype`; a nested absmax is
nested_quant_map[code] x nested_absmax + offset. 8 bits: M.weight int8 [rows, columns] and M.SCB
float32 [rows]; a value is code x SCB x (1 / 127) in fp32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.quantised.matrix import Matrix, piece_rows
from offload.quantised.parts import Parts, damaged
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored

_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SPELT = {dtype: name for name, dtype in _DTYPES.items()}
_STATE = "weight.quant_state.bitsandbytes__"
_STATE_LIMIT_NBYTES = 4096
_ONE_127TH = 7.874015718698502e-3  # bitsandbytes' own; fp32 rounds it to 1 / 127
# The quantiles of a normal distribution that QLoRA's appendix E lists.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# One sign, two exponent bits and one of mantissa, with a subnormal: over the largest one, 12. The
# kernels keep the sign of a zero.
_FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8, 12, 4, 6, 2, 3))
_TABLES = {"nf4": NF4, "fp4": _FP4}


@dataclass(frozen=True)
class _Blocks(Matrix):
    codes: Stored
    absmax: Stored
    nested: tuple[Stored, Stored, int, float] | None  # its absmax, its map, block size, offset
    block: int
    table: tuple[float, ...]

    def fill(self, out: Tensor) -> None:
        table, flat = torch.tensor(self.table), out.view(-1)
        absmax = self._absmax()
        step = piece_rows(1, self.block * 2)
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            octets = self.codes.raw(start // 2, -(-(stop - start) // 2))
            pairs = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()
            values = table.index_select(0, pairs[: stop - start].int())
            scale = absmax[start // self.block : -(-stop // self.block)]
            if (stop - start) % self.block:  # the last block is shorter
                scale = scale.repeat_interleave(self.block)[: stop - start]
                flat[start:stop] = values.mul_(scale)
            else:
                flat[start:stop] = values.view(-1, self.block).mul_(scale[:, None]).view(-1)

    def _absmax(self) -> Tensor:
        stored = self.absmax.read()
        if self.nested is None:
            return stored
        absmax, table, block, offset = self.nested
        scale = absmax.read().repeat_interleave(block)[: stored.numel()]
        return table.read()[stored.int()] * scale + torch.tensor(offset)


@dataclass(frozen=True)
class _Rows(Matrix):
    codes: Stored
    scale: Stored

    def fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        scale = self.scale.read().view(-1, 1)
        step = piece_rows(columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[start:stop] = self.codes.rows(start, stop) * scale[start:stop] * _ONE_127TH


def matrices(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return {f"{module}.weight": _rows(module, parts) for module in parts.modules(".SCB")}
    named = settings.get("bnb_4bit_quant_type", "fp4")
    found: dict[str, Matrix] = {}
    for kind in _TABLES:
        for module in parts.modules(f".{_STATE}{kind}"):
            if kind != named:
                raise CheckpointError(
                    f"{module}.weight is {kind}, and quantization_config in config.json says "
                    f"{named!s:.20}; get the folder again"
                )
            found[f"{module}.weight"] = _blocks(module, kind, parts)
    return found


def _rows(module: str, parts: Parts) -> _Rows:
    name = f"{module}.weight"
    codes = parts.take(name, (torch.int8,), (None, None), name)
    scale = parts.take(f"{module}.SCB", (torch.float32,), (codes.shape[0],), name)
    layout = parts.take_if(f"{module}.weight_format", (torch.uint8,), (), name)
    if layout is not None and int(layout.read()) != 0:
        raise UnsupportedError(
            f"{name} is in a layout of bitsandbytes for one kind of GPU; load the folder and save "
            "it again with bitsandbytes 0.45 or newer"
        )
    return _Rows(torch.float32, codes.shape, codes, scale)


def _blocks(module: str, kind: str, parts: Parts) -> _Blocks:
    name = f"{module}.weight"
    described = parts.take(f"{module}.{_STATE}{kind}", (torch.uint8,), (None,), name)
    state = _State(described, kind)
    numel = math.prod(state.shape)
    codes = parts.left.pop(name, None)
    if codes is None or codes.nbytes != -(-numel // 2):
        found = "not there" if codes is None else f"{codes.nbytes} bytes"
        raise damaged(described, f"describes {state.shape} values, and their codes are {found}")
    blocks = -(-numel // state.block)
    nested = None
    if f"{name}.nested_absmax" in parts.left:
        absmax = parts.take(f"{name}.absmax", (torch.uint8,), (blocks,), name)
        block, offset = state.nested()
        outer = -(-blocks // block)
        nested = (
            parts.take(f"{name}.nested_absmax", (torch.float32,), (outer,), name),
            parts.take(f"{name}.nested_quant_map", (torch.float32,), (256,), name),
            block, offset,
        )  # fmt: skip
    else:
        absmax = parts.take(f"{name}.absmax", (torch.float32,), (blocks,), name)
    table = parts.take(f"{name}.quant_map", (torch.float32,), (16,), name)
    if not torch.equal(table.read(), torch.tensor(_TABLES[kind])):
        raise damaged(table, f"has other values than {kind}")
    return _Blocks(state.dtype, state.shape, codes, absmax, nested, state.block, _TABLES[kind])


class _State:
    """The JSON beside a weight. Raises CheckpointError for contents that no weight has."""

    def __init__(self, stored: Stored, kind: str) -> None:
        self._stored = stored
        if stored.nbytes > _STATE_LIMIT_NBYTES:
            raise damaged(stored, f"has {stored.nbytes} bytes")
        try:
            said = json.loads(bytes(stored.read().tolist()))
        except (ValueError, RecursionError) as error:
            raise damaged(stored, f"is no JSON ({error!s:.80})") from None
        if not isinstance(said, dict) or said.get("quant_type") != kind:
            raise damaged(stored, f"does not describe {kind}")
        self._said = said
        self.block = self._number("blocksize", _BLOCK_SIZES)
        self.dtype = _DTYPES.get(str(said.get("dtype")), torch.int8)
        shape = said.get("shape")
        if self.dtype == torch.int8 or not isinstance(shape, list) or len(shape) != 2:
            raise damaged(stored, f"says dtype {said.get('dtype')!r:.20}, shape {shape!r:.40}")
        if not all(type(size) is int and 0 < size < 1 << 40 for size in shape):
            raise damaged(stored, f"says shape {shape!r:.40}")
        self.shape = tuple(shape)

    def nested(self) -> tuple[int, float]:
        """Return the block size and the offset of an absmax that is stored as codes."""
        offset: Any = self._said.get("nested_offset")
        known = isinstance(offset, float) and math.isfinite(offset)
        if not known or self._said.get("nested_dtype") != "float32":
            raise damaged(self._stored, f"says nested_offset {offset!r:.40}")
        return self._number("nested_blocksize", _BLOCK_SIZES), offset

    def _number(self, key: str, allowed: tuple[int, ...]) -> int:
        found = self._said.get(key)
        if type(found) is not int or found not in allowed:
            raise damaged(self._stored, f"says {key} {found!r:.40}")
        return found


def pack(
    octets: Tensor, absmax: Tensor, shape: Collection[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the parts of a weight in NF4, by the ends of their names: its codes, two per byte, and
    one absmax per block, both 1D."""
    state = {
        "quant_type": "nf4", "blocksize": octets.numel() * 2 // absmax.numel(),
        "dtype": _SPELT[dtype], "shape": list(shape),
    }  # fmt: skip
    said = bytearray(json.dumps(state).encode())
    return {
        "weight": octets[:, None], "weight.absmax": absmax, "weight.quant_map": torch.tensor(NF4),
        f"{_STATE}nf4": torch.frombuffer(said, dtype=torch.uint8),
    }  # fmt: skip


def configuration(dtype: torch.dtype, unquantised: Collection[str]) -> Mapping[str, Any]:
    """Return `quantization_config` of a folder."""
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": _SPELT[dtype], "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(unquantised),
    }  # fmt: skip
