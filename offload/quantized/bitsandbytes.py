"""bitsandbytes: NF4 (QLoRA, arXiv:2305.14314), 4 bits of all elements in a row, in blocks:

    M.weight                                   two codes per byte, the first one in the high bits
    M.weight.absmax                            float32 [blocks]; or uint8, codes themselves:
    M.weight.nested_absmax, .nested_quant_map  ... float32 of blocks of those, and 256 values
    M.weight.quant_map                         the 16 values
    M.weight.quant_state.bitsandbytes__nf4     JSON: shape, dtype, block sizes, offset

A value is quant_map[code] x absmax in fp32, rounded to `dtype`; a nested absmax is
nested_quant_map[code] x nested_absmax + offset.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from offload.display.plain_text import plain
from offload.quantized.matrix import Matrix, piece_rows
from offload.quantized.parts import Parts, damaged
from offload.tiers.errors import UnsupportedError
from offload.weights.tensor_file import Stored

BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
Size = Annotated[int, Field(gt=0, lt=1 << 40)]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SPELT = {dtype: name for name, dtype in _DTYPES.items()}
_STATE = "weight.quant_state.bitsandbytes__nf4"
_STATE_LIMIT_NBYTES = 4096
# The quantiles of a normal distribution that QLoRA's appendix E lists.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class _State(BaseModel):
    """The JSON beside a weight; other keys of it are left out."""

    model_config = ConfigDict(strict=True)

    quant_type: Literal["nf4"]
    blocksize: BlockSize
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: tuple[Size, Size]
    nested_dtype: Literal["float32"] = "float32"
    nested_blocksize: BlockSize | None = None
    nested_offset: Annotated[float, Field(allow_inf_nan=False)] | None = None


@dataclass(frozen=True)
class _Blocks(Matrix):
    codes: Stored
    absmax: Stored
    nested: tuple[Stored, Stored, int, float] | None  # its absmax, its map, block size, offset
    block: int

    def fill(self, out: Tensor) -> None:
        table, flat = torch.tensor(NF4), out.view(-1)
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


def matrices(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit") or kind != "nf4":
        raise UnsupportedError(
            f"weights of bitsandbytes in 8 bits or {kind!s:.20} are not read, in nf4 are; load the "
            "folder once with transformers and bitsandbytes, call model.dequantize(), and "
            "save_pretrained it to another folder"
        )
    modules = parts.modules(f".{_STATE}")
    return {f"{module}.weight": _blocks(module, parts) for module in modules}


def _blocks(module: str, parts: Parts) -> _Blocks:
    name = f"{module}.weight"
    described = parts.take(f"{module}.{_STATE}", (torch.uint8,), (None,), name)
    state = _state_of(described)
    numel = math.prod(state.shape)
    codes = parts.left.pop(name, None)
    if codes is None or codes.nbytes != -(-numel // 2):
        stored = "not there" if codes is None else f"{codes.nbytes} bytes"
        raise damaged(described, f"describes {state.shape} values, and their codes are {stored}")
    blocks = -(-numel // state.blocksize)
    nested = None
    if f"{name}.nested_absmax" in parts.left:
        absmax = parts.take(f"{name}.absmax", (torch.uint8,), (blocks,), name)
        block, offset = state.nested_blocksize, state.nested_offset
        if block is None or offset is None:
            raise damaged(described, "lacks nested_blocksize or nested_offset")
        outer = -(-blocks // block)
        nested = (
            parts.take(f"{name}.nested_absmax", (torch.float32,), (outer,), name),
            parts.take(f"{name}.nested_quant_map", (torch.float32,), (256,), name),
            block, offset,
        )  # fmt: skip
    else:
        absmax = parts.take(f"{name}.absmax", (torch.float32,), (blocks,), name)
    table = parts.take(f"{name}.quant_map", (torch.float32,), (16,), name)
    if not torch.equal(table.read(), torch.tensor(NF4)):
        raise damaged(table, "has other values than nf4")
    return _Blocks(_DTYPES[state.dtype], state.shape, codes, absmax, nested, state.blocksize)


def _state_of(stored: Stored) -> _State:
    """Raises CheckpointError for contents that no weight has."""
    if stored.nbytes > _STATE_LIMIT_NBYTES:
        raise damaged(stored, f"has {stored.nbytes} bytes")
    try:
        return _State.model_validate_json(bytes(stored.read().tolist()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(
            stored, f"does not describe nf4: {where}: {plain(first['msg'], 80)}"
        ) from None


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
        _STATE: torch.frombuffer(said, dtype=torch.uint8),
    }  # fmt: skip


def configuration(dtype: torch.dtype, unquantized: Collection[str]) -> Mapping[str, Any]:
    """Return `quantization_config` of a folder."""
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": _SPELT[dtype], "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(unquantized),
    }  # fmt: skip
