# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, SIM108 - what is fixed at compile time is written so in Triton
"""The Triton kernel of `kernels.triton_convert`; see there."""

import triton
import triton.language as tl

from offload.kernels.gpu.triton_ops import decode, encode, join, load, split_high, split_low, store
from offload.kernels.gpu.triton_states import (
    CODE_BLOCK,
    INT8_STATES,
    load_state,
    random_bits,
    store_state,
)

ENCODE = tl.constexpr(0)
DECODE = tl.constexpr(1)
SPLIT = tl.constexpr(2)
JOIN = tl.constexpr(3)
ENCODE_STATE = tl.constexpr(4)
DECODE_STATE = tl.constexpr(5)


@triton.jit
def _convert(
    a, b, c, offsets, blocks, numel, key, first,
    ACTION: tl.constexpr, FORMAT: tl.constexpr, SIGNED: tl.constexpr, UPPER: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    if ACTION == ENCODE:
        store(b, offsets, encode(load(a, offsets, numel, WHOLE), FORMAT), numel, WHOLE)
    elif ACTION == DECODE:
        store(b, offsets, decode(load(a, offsets, numel, WHOLE), FORMAT), numel, WHOLE)
    elif ACTION == SPLIT:
        value = load(a, offsets, numel, WHOLE)
        store(b, offsets, split_high(value), numel, WHOLE)
        store(c, offsets, split_low(value), numel, WHOLE)
    elif ACTION == JOIN:
        value = join(load(a, offsets, numel, WHOLE), load(b, offsets, numel, WHOLE))
        store(c, offsets, value, numel, WHOLE)
    elif ACTION == ENCODE_STATE:
        draw = random_bits(first + offsets.to(tl.uint32), key)
        if UPPER:
            draw = draw >> 16
        else:
            draw = draw & 0xFFFF
        value = load(a, offsets, numel, WHOLE)
        store_state(b, c, offsets, blocks, value, draw, numel, FORMAT, SIGNED, WHOLE)
    else:
        value = load_state(a, b, offsets, blocks, numel, FORMAT, SIGNED, WHOLE)
        store(c, offsets, value, numel, WHOLE)


@triton.jit(do_not_specialize=["numel", "key", "first"])
def convert_kernel(
    a, b, c, numel: tl.int64, key: tl.uint32, first: tl.uint32,
    ACTION: tl.constexpr, FORMAT: tl.constexpr, SIGNED: tl.constexpr, UPPER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK elements; a, b, c in the order of the public function.

    FORMAT is a Float, or with the two actions on states a StateFormat.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if ACTION >= ENCODE_STATE and FORMAT == INT8_STATES:
        rows = tl.arange(0, BLOCK // CODE_BLOCK)[:, None]
        offsets = start + rows * CODE_BLOCK + tl.arange(0, CODE_BLOCK)[None, :]
        blocks = start // CODE_BLOCK + rows
    else:
        offsets = start + tl.arange(0, BLOCK)
        blocks = offsets
    key = tl.cast(key, tl.uint32)
    first = tl.cast(first, tl.uint32)
    if start + BLOCK <= numel:
        _convert(
            a, b, c, offsets, blocks, numel, key, first, ACTION, FORMAT, SIGNED, UPPER, True
        )  # fmt: skip
    else:
        _convert(
            a, b, c, offsets, blocks, numel, key, first, ACTION, FORMAT, SIGNED, UPPER, False
        )  # fmt: skip
