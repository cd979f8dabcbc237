# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803 - what is fixed at compile time is written so in Triton
"""The Triton kernel of `kernels.triton_weight_codes`; see there.

Groups are the rows of a tile: offsets are (rows, GROUP), words (rows, 1).
"""

import triton
import triton.language as tl

from offload.kernels import weight_formats as formats
from offload.kernels.gpu.triton_ops import FP16, FP32, bits_of, decode, encode, from_bits
from offload.kernels.weight_formats import Code

INT8 = tl.constexpr(int(Code.INT8))
INT4 = tl.constexpr(int(Code.INT4))
LEAST_SCALE_BITS = tl.constexpr(formats.LEAST_SCALE_BITS)
GRID_STEP_BITS = tl.constexpr(formats.GRID_STEP_BITS)
INT8_SCALE_MASK = tl.constexpr(formats.INT8_SCALE_MASK)
SIXTEEN_FIFTEENTHS = tl.constexpr(formats.SIXTEEN_FIFTEENTHS)
LEVELS = tl.constexpr(formats.NF4_LEVELS)
MIDPOINTS = tl.constexpr(formats.NF4_MIDPOINTS)
MOST_FP32 = tl.constexpr(formats.LARGEST[0])
MOST_BF16 = tl.constexpr(formats.LARGEST[1])
MOST_FP16 = tl.constexpr(formats.LARGEST[2])


@triton.jit
def rint(value):
    """Round fp32 below 2**22 in magnitude to the nearest integer (int32), ties to even."""
    return (bits_of(value + 12582912.0) - 0x4B400000).to(tl.int32, bitcast=True)


@triton.jit
def level(code):
    """The value of an NF4 code with a scale of 1."""
    found = tl.full(code.shape, LEVELS[0], tl.float32)
    for place in tl.static_range(1, 16):
        found = tl.where(code == place, LEVELS[place], found)
    return found


@triton.jit
def within(value, FLOAT: tl.constexpr):
    """Clamp to the largest finite numbers of a format; a NaN stays one."""
    if FLOAT == FP32:
        most = MOST_FP32
    elif FLOAT == FP16:
        most = MOST_FP16
    else:
        most = MOST_BF16
    value = tl.where(value > most, most, value)
    return tl.where(value < -most, -most, value)


@triton.jit
def decode_codes(values, words, codes, offsets, rows, inside, CODE: tl.constexpr,
                 FLOAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Decode the groups `rows`, where they are `inside`."""
    word = tl.load(words + rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    if CODE == INT8:
        raw = tl.load(codes + offsets, mask=inside, other=0).to(tl.int8, bitcast=True)
        value = raw.to(tl.float32) * from_bits(word)
    else:
        places = rows * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        pair = tl.load(codes + places, mask=inside, other=0).to(tl.int32)
        low, high = pair & 15, pair >> 4
        if CODE == INT4:
            steps = tl.reshape(tl.join(low, high), (ROWS, GROUP)) - (word & 15).to(tl.int32)
            value = within(steps.to(tl.float32) * from_bits(word & 0xFFFFFFF0), FLOAT)
        else:
            value = level(tl.reshape(tl.join(high, low), (ROWS, GROUP))) * from_bits(word)
    tl.store(values + offsets, encode(value, FLOAT), mask=inside)


@triton.jit
def int4_scale(up, down):
    """Bits of the scale for groups of these extremes, and z; uint32 and int32."""
    step = (from_bits(up) * 0.0625 + from_bits(down) * 0.0625) * SIXTEEN_FIFTEENTHS
    bits = (bits_of(step) + GRID_STEP_BITS // 2) & (0x100000000 - GRID_STEP_BITS)
    bits = tl.maximum(bits.to(tl.uint32), LEAST_SCALE_BITS)
    steps = rint(tl.div_rn(from_bits(up), from_bits(bits)))
    steps += rint(tl.div_rn(from_bits(down), from_bits(bits)))
    lower = tl.maximum(bits - GRID_STEP_BITS, LEAST_SCALE_BITS)
    bits = tl.where(steps < 15, lower, bits)
    zero = rint(tl.div_rn(from_bits(down), from_bits(bits)))
    return bits, tl.minimum(zero, 15)


@triton.jit
def encode_codes(values, words, codes, offsets, rows, inside, CODE: tl.constexpr,
                 FLOAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Encode the groups `rows`, where they are `inside`."""
    value = decode(tl.load(values + offsets, mask=inside, other=0), FLOAT)
    raw = bits_of(value)
    # what has the other sign is below zero as an integer
    up = tl.max(tl.maximum(raw.to(tl.int32, bitcast=True), 0), axis=1)
    down = tl.max(tl.maximum((raw ^ 0x80000000).to(tl.int32, bitcast=True), 0), axis=1)
    up = tl.expand_dims(up, 1).to(tl.uint32, bitcast=True)
    down = tl.expand_dims(down, 1).to(tl.uint32, bitcast=True)
    largest = tl.maximum(up, down)
    finite = largest < 0x7F800000
    if CODE == INT4:
        scale, zero = int4_scale(tl.where(finite, up, 0), tl.where(finite, down, 0))
    else:
        scale = tl.where(finite, largest, 0)
        if CODE == INT8:
            step = tl.div_rn(from_bits(scale), tl.full(scale.shape, 127.0, tl.float32))
            scale = bits_of(step) & INT8_SCALE_MASK
        scale = tl.maximum(scale, LEAST_SCALE_BITS)
        zero = tl.zeros(scale.shape, tl.int32)
    word = tl.where(finite, scale | zero.to(tl.uint32), 0x7FC00000)
    tl.store(words + rows, word.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
    ratio = tl.div_rn(tl.where(finite, value, 0.0), from_bits(scale) + tl.zeros_like(value))
    if CODE == INT8:
        code = rint(ratio).to(tl.int8).to(tl.uint8, bitcast=True)
        tl.store(codes + offsets, code, mask=inside)
    else:
        if CODE == INT4:
            code = tl.minimum(tl.maximum(rint(ratio) + zero, 0), 15)
        else:
            code = tl.zeros(ratio.shape, tl.int32)
            for place in tl.static_range(0, 15):
                code += (ratio > MIDPOINTS[place]).to(tl.int32)
        first, second = tl.split(tl.reshape(code, (ROWS, GROUP // 2, 2)))
        pair = first | (second << 4) if CODE == INT4 else (first << 4) | second
        places = rows * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes + places, pair.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["groups"])
def code_kernel(
    values, words, codes, groups: tl.int64,
    ACTION: tl.constexpr, CODE: tl.constexpr, FLOAT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK elements; encodes with ACTION 0, decodes with 1."""
    ROWS: tl.constexpr = BLOCK // GROUP
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = rows * GROUP + tl.arange(0, GROUP)[None, :]
    inside = rows < groups
    if ACTION == 0:
        encode_codes(values, words, codes, offsets, rows, inside, CODE, FLOAT, GROUP, ROWS)
    else:
        decode_codes(values, words, codes, offsets, rows, inside, CODE, FLOAT, GROUP, ROWS)
