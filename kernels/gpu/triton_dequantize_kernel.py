# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - what is fixed at compile time is written so in Triton
"""The Triton kernel of `kernels.gpu.triton_dequantize`; see there.

Groups are the rows of a tile: offsets are (rows, GROUP), words (rows, 1).
"""

import triton
import triton.language as tl

from offload.kernels import weight_formats as formats
from offload.kernels.gpu.triton_ops import FP16, FP32, encode, from_bits
from offload.kernels.weight_formats import QuantType

INT8 = tl.constexpr(int(QuantType.INT8))
INT4 = tl.constexpr(int(QuantType.INT4))
LEVELS = tl.constexpr(formats.NF4_LEVELS)
MAX_FP32 = tl.constexpr(formats.LARGEST[0])
MAX_BF16 = tl.constexpr(formats.LARGEST[1])
MAX_FP16 = tl.constexpr(formats.LARGEST[2])


@triton.jit
def level(code):
    """The value of an NF4 code with a scale of 1."""
    value = tl.full(code.shape, LEVELS[0], tl.float32)
    for place in tl.static_range(1, 16):
        value = tl.where(code == place, LEVELS[place], value)
    return value


@triton.jit
def within(value, FLOAT: tl.constexpr):
    """Clamp to the largest finite numbers of a format; a NaN stays one."""
    if FLOAT == FP32:
        limit = MAX_FP32
    elif FLOAT == FP16:
        limit = MAX_FP16
    else:
        limit = MAX_BF16
    value = tl.where(value > limit, limit, value)
    return tl.where(value < -limit, -limit, value)


@triton.jit(do_not_specialize=["groups"])
def dequantize_kernel(
    values, words, codes, groups: tl.int64,
    TYPE: tl.constexpr, FLOAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dequantize one program's BLOCK elements."""
    ROWS: tl.constexpr = BLOCK // GROUP
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = rows * GROUP + tl.arange(0, GROUP)[None, :]
    inside = rows < groups
    word = tl.load(words + rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    if TYPE == INT8:
        raw = tl.load(codes + offsets, mask=inside, other=0).to(tl.int8, bitcast=True)
        value = raw.to(tl.float32) * from_bits(word)
    else:
        places = rows * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        pair = tl.load(codes + places, mask=inside, other=0).to(tl.int32)
        low, high = pair & 15, pair >> 4
        if TYPE == INT4:
            steps = tl.reshape(tl.join(low, high), (ROWS, GROUP)) - (word & 15).to(tl.int32)
            value = within(steps.to(tl.float32) * from_bits(word & 0xFFFFFFF0), FLOAT)
        else:
            value = level(tl.reshape(tl.join(high, low), (ROWS, GROUP))) * from_bits(word)
    tl.store(values + offsets, encode(value, FLOAT), mask=inside)
