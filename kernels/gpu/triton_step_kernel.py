# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, RET505 - what is fixed at compile time is written so in Triton
"""The Triton kernel of `kernels.gpu.triton_optimizer`: the frame around a rule; see there."""

import triton
import triton.language as tl

from offload.kernels.floats import Float
from offload.kernels.gpu.triton_ops import decode, encode, join, load, split_high, split_low, store
from offload.kernels.gpu.triton_rules import apply
from offload.kernels.gpu.triton_states import (
    CODE_BLOCK,
    FP32_STATES,
    INT8_STATES,
    load_state,
    random_bits,
    round_bf16,
    store_state,
)
from offload.kernels.variants import NO_GRADIENT, Master

SPLIT = tl.constexpr(int(Master.SPLIT))
MASTER_FP32 = tl.constexpr(int(Master.FP32))
WEIGHT_BF16 = tl.constexpr(int(Float.BF16))
ZEROS = tl.constexpr(NO_GRADIENT)


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
