# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, RET505, SIM108 - what is fixed at compile time is written so in Triton
"""The Triton kernel of `kernels.gpu.triton_optimizer`: the frame around a rule; see there.

States have the bits of `kernels.cpu.noise` and `int8`. Blocks of the 8-bit code are the rows of a
tile: offsets are (rows, 256) and scales (rows, 1). The other formats do not care what shape their
offsets have.
"""

import triton
import triton.language as tl

from offload.kernels.cpu import int8, noise
from offload.kernels.floats import Float
from offload.kernels.gpu.triton_ops import (
    bits_of,
    bits_or_nan,
    decode,
    encode,
    from_bits,
    high_half,
    join,
    load,
    split_high,
    split_low,
    store,
    widen_bits,
)
from offload.kernels.gpu.triton_rules import apply
from offload.kernels.rules import StateFormat
from offload.kernels.variants import NO_GRADIENT, Master

SPLIT = tl.constexpr(int(Master.SPLIT))
MASTER_FP32 = tl.constexpr(int(Master.FP32))
WEIGHT_BF16 = tl.constexpr(int(Float.BF16))
ZEROS = tl.constexpr(NO_GRADIENT)
FP32_STATES = tl.constexpr(int(StateFormat.FP32))
BF16_STATES = tl.constexpr(int(StateFormat.BF16))
INT8_STATES = tl.constexpr(int(StateFormat.INT8))
CODE_BLOCK = tl.constexpr(int8.BLOCK)
GOLDEN = tl.constexpr(noise.GOLDEN)


@triton.jit
def random_bits(numbers, key):
    """32 random bits for elements of these numbers (uint32) in their group's flat buffer."""
    x = (numbers * GOLDEN) ^ key
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def round_bf16(value, draw):
    """fp32 -> bf16 as int16, up or down by 16 random bits."""
    return high_half(bits_or_nan(value) + draw)


@triton.jit
def block_scale(value, SIGNED: tl.constexpr):
    """(rows, 256) fp32 -> (rows, 1): the scale of each row's codes, a power of two, or NaN."""
    magnitude = (bits_of(value) & 0x7FFFFFFF).to(tl.int32)
    largest = tl.expand_dims(tl.max(magnitude, axis=1), 1)
    exponent = (largest + 0x200000) >> 23
    if SIGNED:
        exponent = tl.maximum(exponent - 15, 8)
    else:
        exponent = tl.maximum(exponent - 31, 8)
    bits = tl.where(largest >= 0x7F800000, 0x7FC00000, exponent << 23)
    return from_bits(bits.to(tl.uint32, bitcast=True))


@triton.jit
def encode_int8(value, scale, draw, SIGNED: tl.constexpr):
    """fp32 and the scale of its block -> uint8, up or down by 16 random bits."""
    distance = bits_of(tl.abs(value) + scale) - bits_of(scale)
    code = (distance + (draw << 4) + 8) >> 20
    if SIGNED:
        code = code | ((bits_of(value) >> 31) << 7)
    else:
        code = tl.where((code == 0) & (value != 0.0), 1, code)
    return tl.where(scale != scale, 0, code).to(tl.uint8)


@triton.jit
def decode_int8(code, scale, SIGNED: tl.constexpr):
    """uint8 and the scale of its block -> fp32 (exact)."""
    code = code.to(tl.uint32)
    if SIGNED:
        value = from_bits(bits_of(scale) + ((code & 0x7F) << 20)) - scale
        # By bits: Triton before 3.7 compiles -x to 0 - x, which loses the sign of a zero.
        return from_bits(bits_of(value) | ((code & 0x80) << 24))
    else:
        return from_bits(bits_of(scale) + (code << 20)) - scale


@triton.jit
def load_state(
    pointer, scales, offsets, blocks, numel,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """fp32 values of a state, 0 beyond numel."""
    raw = load(pointer, offsets, numel, WHOLE)
    if FORMAT == INT8_STATES:
        scale = load(scales, blocks, tl.cdiv(numel, CODE_BLOCK), WHOLE)
        return decode_int8(raw, scale, SIGNED)
    elif FORMAT == BF16_STATES:
        return from_bits(widen_bits(raw) << 16)
    else:
        return raw


@triton.jit
def store_state(
    pointer, scales, offsets, blocks, value, draw, numel,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store fp32 values of a state; `draw` holds 16 random bits for each."""
    if FORMAT == INT8_STATES:
        # Beyond numel everything was loaded as 0 and no rule made anything else of it, so it has
        # no say in the scale of a short block.
        scale = block_scale(value, SIGNED)
        store(pointer, offsets, encode_int8(value, scale, draw, SIGNED), numel, WHOLE)
        store(scales, blocks, scale, tl.cdiv(numel, CODE_BLOCK), WHOLE)
    elif FORMAT == BF16_STATES:
        store(pointer, offsets, round_bf16(value, draw), numel, WHOLE)
    else:
        store(pointer, offsets, value, numel, WHOLE)


@triton.jit
def _load_weight(
    weight, extra, offsets, numel,
    WEIGHT: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The fp32 weight, wherever it is."""
    if MASTER == SPLIT:
        high = load(weight, offsets, numel, WHOLE)
        return join(high, load(extra, offsets, numel, WHOLE))
    elif MASTER == MASTER_FP32:
        return load(extra, offsets, numel, WHOLE)
    else:
        return decode(load(weight, offsets, numel, WHOLE), WEIGHT)


@triton.jit
def _store_weight(
    weight, extra, offsets, p, numbers, weight_key, numel,
    WEIGHT: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if MASTER == SPLIT:
        store(weight, offsets, split_high(p), numel, WHOLE)
        store(extra, offsets, split_low(p), numel, WHOLE)
    elif MASTER == MASTER_FP32:
        store(extra, offsets, p, numel, WHOLE)
        store(weight, offsets, encode(p, WEIGHT), numel, WHOLE)
    elif WEIGHT == WEIGHT_BF16:
        draw = random_bits(numbers, weight_key) >> 16
        store(weight, offsets, round_bf16(p, draw), numel, WHOLE)
    else:
        store(weight, offsets, p, numel, WHOLE)


@triton.jit
def _update(
    grad, weight, extra, state0, state1, state2, scales0, scales1, offsets, blocks, numel,
    key, weight_key, first, c0, c1, c2, c3, c4, c5, c6, c7,
    RULE: tl.constexpr, FLAG: tl.constexpr, GRAD: tl.constexpr, WEIGHT: tl.constexpr,
    MASTER: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr, FORMAT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip  # fmt: skip
    """Load, step and store the elements at `offsets`; all of them if WHOLE. SIGNED: state 0."""
    p = _load_weight(weight, extra, offsets, numel, WEIGHT, MASTER, WHOLE)
    if GRAD == ZEROS:
        g = tl.zeros_like(p) * c0
    else:
        g = decode(load(grad, offsets, numel, WHOLE), GRAD) * c0
    m = g
    v = g
    x = g
    if STATES >= 1:
        m = load_state(state0, scales0, offsets, blocks, numel, FORMAT, SIGNED, WHOLE)
    if STATES >= 2:
        v = load_state(state1, scales1, offsets, blocks, numel, FORMAT, False, WHOLE)
    if STATES >= 3:
        x = load(state2, offsets, numel, WHOLE)
    p, m, v, x = apply(g, p, m, v, x, c1, c2, c3, c4, c5, c6, c7, RULE, FLAG, STATES)
    numbers = first + offsets.to(tl.uint32)
    draws = numbers
    if FORMAT != FP32_STATES:
        draws = random_bits(numbers, key)
    if STATES >= 1:
        store_state(
            state0, scales0, offsets, blocks, m, draws >> 16, numel, FORMAT, SIGNED, WHOLE
        )  # fmt: skip
    if STATES >= 2:
        store_state(
            state1, scales1, offsets, blocks, v, draws & 0xFFFF, numel, FORMAT, False, WHOLE
        )  # fmt: skip
    if STATES >= 3:
        store(state2, offsets, x, numel, WHOLE)
    _store_weight(weight, extra, offsets, p, numbers, weight_key, numel, WEIGHT, MASTER, WHOLE)


@triton.jit(do_not_specialize=["numel", "key", "weight_key", "first"])
def step_kernel(
    grad, weight, extra, state0, state1, state2, scales0, scales1,
    numel: tl.int64, key: tl.uint32, weight_key: tl.uint32, first: tl.uint32,
    c0, c1, c2, c3, c4, c5, c6, c7,
    RULE: tl.constexpr, FLAG: tl.constexpr, GRAD: tl.constexpr, WEIGHT: tl.constexpr,
    MASTER: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip  # fmt: skip
    """One program per BLOCK elements. Unused pointers and constants may be anything.

    The casts do nothing on a GPU; the interpreter has Python numbers there, and would do fp64
    arithmetic with a denormal one.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if FORMAT == INT8_STATES:
        rows = tl.arange(0, BLOCK // CODE_BLOCK)[:, None]
        offsets = start + rows * CODE_BLOCK + tl.arange(0, CODE_BLOCK)[None, :]
        blocks = start // CODE_BLOCK + rows
    else:
        offsets = start + tl.arange(0, BLOCK)
        blocks = offsets
    key = tl.cast(key, tl.uint32)
    weight_key = tl.cast(weight_key, tl.uint32)
    first = tl.cast(first, tl.uint32)
    c0 = tl.cast(c0, tl.float32)
    c1 = tl.cast(c1, tl.float32)
    c2 = tl.cast(c2, tl.float32)
    c3 = tl.cast(c3, tl.float32)
    c4 = tl.cast(c4, tl.float32)
    c5 = tl.cast(c5, tl.float32)
    c6 = tl.cast(c6, tl.float32)
    c7 = tl.cast(c7, tl.float32)
    if start + BLOCK <= numel:
        _update(
            grad, weight, extra, state0, state1, state2, scales0, scales1, offsets, blocks, numel,
            key, weight_key, first, c0, c1, c2, c3, c4, c5, c6, c7,
            RULE, FLAG, GRAD, WEIGHT, MASTER, STATES, SIGNED, FORMAT, True,
        )  # fmt: skip
    else:
        _update(
            grad, weight, extra, state0, state1, state2, scales0, scales1, offsets, blocks, numel,
            key, weight_key, first, c0, c1, c2, c3, c4, c5, c6, c7,
            RULE, FLAG, GRAD, WEIGHT, MASTER, STATES, SIGNED, FORMAT, False,
        )  # fmt: skip
