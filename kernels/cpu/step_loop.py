"""The compiled loops of `kernels.cpu.optimizer`: one frame around all rules and formats.

Per vector of elements: load and widen the gradient, the weight and the states, apply the rule,
round and store. With 8-bit states a block is done in two sweeps over data in the nearest cache: the
first leaves the new states in a buffer on the stack and takes their largest magnitude, the second
encodes them with the scale that follows from it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from offload.kernels.cpu import jit, lanes
from offload.kernels.cpu.int8 import BLOCK, decode_int8, encode_int8, scale_bits_for
from offload.kernels.cpu.lanes import F32, I8, I32, I64, WIDTH, Lanes, Value, sweep
from offload.kernels.cpu.rule_lanes import RULES
from offload.kernels.cpu.step_parts import Operands
from offload.kernels.floats import Float
from offload.kernels.rules import StateFormat
from offload.kernels.variants import NO_GRADIENT, Variant

# Elements per round of a loop: a round loads from all arrays, computes, then stores. 128 fill the
# 32 registers of AVX-512 (4 operands of 8 vectors; 256 spill), 16 are what AVX2's 16 can hold.
BURST = 128 if lanes.has_wide_registers() else WIDTH
# Elements per round of the second sweep: the root of one vector hides behind the codes of another.
_CODE_BURST = 2 * WIDTH
SPAN = 2048  # elements on which several steps are made in turn: 24 KiB of fp32 weight and states
# Places in the kernel's `arguments`: addresses, then numbers.
GRAD, WEIGHT, EXTRA, STATES, SCALES, KEY, WEIGHT_KEY, FIRST, NUMEL = 0, 1, 2, 3, 6, 8, 9, 10, 11
ARGUMENTS = 12
_DIGEST = jit.digest(
    __file__, "cpu/int8.py", "cpu/noise.py", "cpu/rule_lanes.py", "rules.py", "cpu/step_parts.py",
    "variants.py",
)  # fmt: skip


@cache
def step_loop(code: int) -> jit.Kernel:
    """The kernel of `Variant.from_code(code)`; compiled, or loaded from disk, at its first call.

    kernel(arguments, constants, lo, hi): `arguments` is int64 (ARGUMENTS,) in the order above,
    `constants` those of the scalars; lo .. hi are elements, or blocks if the states are INT8.
    Addresses instead of arrays, so that one compiled version serves read-only gradients, too.
    """
    plan = jit.plan(code, _DIGEST)

    def step(arguments, constants, lo, hi):  # type: ignore[no-untyped-def]
        _step(plan, arguments, constants, lo, hi)

    return jit.compiled(step)


@cache
def replay_loop(code: int) -> jit.Kernel:
    """The kernel of several steps, the last one of `Variant.from_code(code)`, those before it with
    a gradient of zeros.

    As that of `step_loop`, but `arguments` and `constants` have a row per step. It makes all steps
    on some elements before it goes on to the next: they cross memory once.
    """
    last, missed = jit.plan(code, _DIGEST), jit.plan(code | NO_GRADIENT, _DIGEST)
    span = SPAN // BLOCK if Variant.from_code(code).states is StateFormat.INT8 else SPAN

    def replay(arguments, constants, lo, hi):  # type: ignore[no-untyped-def]
        for start in range(lo, hi, span):
            stop = min(start + span, hi)
            for row in range(len(constants) - 1):
                _step(missed, arguments[row], constants[row], start, stop)
            _step(last, arguments[-1], constants[-1], start, stop)

    return jit.compiled(replay)


@intrinsic(prefer_literal=True)
def _step(typing, plan, arguments, constants, lo, hi):  # type: ignore[no-untyped-def]
    code = jit.variant_of(plan)
    if code is None:
        return None
    variant = Variant.from_code(code)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        packed, scalars = jit.pointers(context, builder, signature, args, 1, 3)
        lo, hi = jit.integers(context, builder, signature, args, 3, 5)
        operands = load_operands(builder, variant, packed, scalars)
        if variant.states is StateFormat.INT8:
            _Blocks(builder, operands).loop(lo, hi)
        else:
            _elements(builder, operands, lo, hi)
        return context.get_dummy_value()

    return jit.returns_nothing(plan, arguments, constants, lo, hi), emit


def load_operands(
    builder: ir.IRBuilder, variant: Variant, packed: Value, scalars: Value
) -> Operands:
    """Emit loads of the `arguments` and of the rule's constants."""

    def number(place: int) -> Value:
        return builder.load(builder.gep(packed, [I64(place)]))

    def start(place: int) -> Value:
        return builder.inttoptr(number(place), I8.as_pointer())

    def uint32(place: int) -> Value:
        return builder.trunc(number(place), I32)

    count = variant.state_count if variant.states is StateFormat.INT8 else 0
    constants = range(RULES[variant.rule].constants)
    return Operands(
        variant, start(GRAD), start(WEIGHT), start(EXTRA),
        [start(STATES + place) for place in range(variant.state_count)],
        [start(SCALES + place) for place in range(count)],
        uint32(KEY), uint32(WEIGHT_KEY), uint32(FIRST), number(NUMEL),
        [builder.load(builder.gep(scalars, [I64(place)])) for place in constants],
    )  # fmt: skip


def _elements(builder: ir.IRBuilder, at: Operands, lo: Value, hi: Value) -> None:
    """Emit the loop over elements lo .. hi, for states without a scale."""
    kind = Float.FP32 if at.variant.states is StateFormat.FP32 else Float.BF16

    def step(vector: Lanes, index: Value) -> Iterator[None]:
        g, p = at.load_gradient(vector, index), at.load_weight(vector, index)
        states = [vector.load(kind, array, index) for array in at.states]
        yield
        new, way = at.moments(vector, g, p, states)
        p = at.new_weight(vector, p, at.root(vector, way))
        yield
        store_states(vector, index, new)
        at.store_weight(vector, p, index)

    def store_states(vector: Lanes, index: Value, new: Sequence[Value]) -> None:
        if kind is Float.FP32:
            for value, array in zip(new, at.states, strict=True):
                vector.store(kind, value, array, index)
            return
        halves = at.random_halves(vector, index, at.key)
        for place, value in enumerate(new):
            bits = vector.add_noise(value, halves[place], signed=at.variant.signed[place])
            vector.store_bf16(bits, at.states[place], index)

    sweep(builder, lo, hi, BURST, step)


class _Blocks:
    """Emits the loop over blocks, for 8-bit states."""

    def __init__(self, builder: ir.IRBuilder, at: Operands) -> None:
        self.builder, self.at = builder, at
        self.signed = at.variant.signed
        # Per state: the new values of a block (in the order of lanes), and their largest magnitude.
        room = ir.ArrayType(F32, BLOCK)
        self.fresh = [cgutils.alloca_once(builder, room) for _ in at.states]
        self.largest = {
            width: [cgutils.alloca_once(builder, ir.VectorType(I32, width)) for _ in at.states]
            for width in (WIDTH, 1)
        }

    def loop(self, lo: Value, hi: Value) -> None:
        builder = self.builder
        with cgutils.for_range_slice(builder, lo, hi, I64(1), I64) as (number, _):
            start = builder.mul(number, I64(BLOCK))
            limit = builder.add(start, I64(BLOCK))
            numel = self.at.numel
            end = builder.select(builder.icmp_signed("<", limit, numel), limit, numel)
            self._update(number, start, end)
            scales = [self._new_scale(place, number) for place in range(len(self.at.states))]
            self._encode(scales, start, end)

    def _update(self, number: Value, start: Value, end: Value) -> None:
        """First sweep: new states into the buffer, with their largest magnitudes."""
        builder, at = self.builder, self.at
        old = [builder.load(self._scale(place, number)) for place in range(len(at.states))]
        for width, places in self.largest.items():
            for place in places:
                builder.store(Lanes(builder, width).constant(I32, 0), place)

        def step(vector: Lanes, index: Value) -> Iterator[None]:
            g, p = at.load_gradient(vector, index), at.load_weight(vector, index)
            states = [
                decode_int8(vector, array, index, vector.splat(bits), signed)
                for array, bits, signed in zip(at.states, old, self.signed, strict=True)
            ]
            yield
            new, way = at.moments(vector, g, p, states)
            for place, value in enumerate(new):
                vector.store_raw(value, self.fresh[place], builder.sub(index, start))
                self._note_magnitude(vector, place, value)
            if not at.rule.weight_last:
                p = at.new_weight(vector, p, at.root(vector, way))
                at.store_weight(vector, p, index)

        sweep(builder, start, end, WIDTH, step)

    def _encode(self, scales: Sequence[tuple[Value, Value]], start: Value, end: Value) -> None:
        """Second sweep: from the buffer to bytes."""
        builder, at = self.builder, self.at

        def step(vector: Lanes, index: Value) -> Iterator[None]:
            inside = builder.sub(index, start)
            fresh = [vector.load_raw(F32, array, inside) for array in self.fresh]
            way = at.root(vector, fresh) if at.rule.weight_last else ()
            noise = at.random_halves(vector, index, at.key, shift=4)
            yield
            for place, value in enumerate(fresh):
                bits, keep = scales[place]
                code = encode_int8(vector, value, bits, noise[place], self.signed[place])
                vector.store_code(code, keep, at.states[place], index)
            if at.rule.weight_last:
                p = at.new_weight(vector, at.load_weight(vector, index), way)
                at.store_weight(vector, p, index)

        if at.states:
            sweep(builder, start, end, _CODE_BURST, step)

    def _note_magnitude(self, vector: Lanes, place: int, value: Value) -> None:
        where = self.largest[vector.width][place]
        # What has no sign needs none taken off; a NaN with one is larger than infinity, too.
        if self.signed[place]:
            magnitude = vector.magnitude_bits(value)
        else:
            magnitude = self.builder.bitcast(value, vector.of(I32))
        seen = vector.unsigned_max(magnitude, self.builder.load(where))
        self.builder.store(seen, where)

    def _new_scale(self, place: int, number: Value) -> tuple[Value, Value]:
        """The bits of the block's new scale, stored; and the bits to keep of its bytes."""
        builder = self.builder
        wide, single = (
            Lanes(builder, width).largest(builder.load(places[place]))
            for width, places in self.largest.items()
        )
        largest = builder.select(builder.icmp_unsigned(">", wide, single), wide, single)
        bits, finite = scale_bits_for(builder, largest, self.signed[place])
        builder.store(bits, self._scale(place, number))
        return bits, builder.sext(finite, I8)

    def _scale(self, place: int, number: Value) -> Value:
        scales = self.builder.bitcast(self.at.scales[place], I32.as_pointer())
        return self.builder.gep(scales, [number])
