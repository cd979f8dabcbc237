"""Vector arithmetic in LLVM IR, for kernels whose bits must not depend on how a loop was cut.

The usual way to a fast loop, leaving it to the auto-vectoriser, gives no say in where a multiply
and an add become one fused operation: the vector body, the scalar tail and another CPU may each
decide differently. Here the operations are written out. `Lanes` emits them for `width` neighbouring
elements; the tail is the same code at width 1; nothing carries a fast-math flag. So an element's
bits follow from the sequence of IEEE 754 operations alone: fused multiply-add, multiply, divide and
square root, each rounded once, to nearest even. They assume the default floating-point environment
(denormals kept: a thread on which somebody set flush-to-zero is on its own).

Only the payload of a NaN is left open (x86 picks one by operand order); that it is a NaN is not.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from offload.kernels.floats import Float

Value = Any  # llvmlite's ir.Value is untyped

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

STORAGE = {Float.FP32: F32, Float.BF16: I16, Float.FP16: F16}
NAN_BITS = 0x7FC00000  # the NaN that encoders to bf16 write, as fp32 bits


# One vector is 16 elements everywhere: a cache line of fp32, one AVX-512 register or two of AVX2.
WIDTH = 16


def has_wide_registers() -> bool:
    """Whether this CPU has 32 registers of 64 bytes (AVX-512). Speed depends on it, bits do not."""
    return bool(llvm.get_host_cpu_features().get("avx512f"))


class Lanes:
    """Emits operations on vectors of `width` elements at the position of an IR builder."""

    def __init__(self, builder: ir.IRBuilder, width: int) -> None:
        self.builder = builder
        self.width = width

    def of(self, scalar: ir.Type) -> ir.VectorType:
        """The vector type over a scalar type."""
        return ir.VectorType(scalar, self.width)

    def constant(self, scalar: ir.Type, value: float) -> Value:
        return ir.Constant(self.of(scalar), [value] * self.width)

    def splat(self, value: Value) -> Value:
        """A scalar in every lane."""
        empty = ir.Constant(self.of(value.type), ir.Undefined)
        first = self.builder.insert_element(empty, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, empty, self.constant(I32, 0))

    def load_raw(self, scalar: ir.Type, base: Value, index: Value) -> Value:
        """Elements index .. index + width; only element alignment is assumed."""
        return self.builder.load(self._at(scalar, base, index), align=_alignment(scalar))

    def store_raw(self, value: Value, base: Value, index: Value) -> None:
        scalar = value.type.element
        self.builder.store(value, self._at(scalar, base, index), align=_alignment(scalar))

    def load(self, kind: Float, base: Value, index: Value) -> Value:
        """Elements of any format, widened to fp32 (exact)."""
        return self.decode(kind, self.load_raw(STORAGE[kind], base, index))

    def store(self, kind: Float, value: Value, base: Value, index: Value) -> None:
        """fp32 lanes, rounded to nearest even in the array's format."""
        self.store_raw(self.encode(kind, value), base, index)

    def decode(self, kind: Float, raw: Value) -> Value:
        if kind is Float.FP32:
            return raw
        if kind is Float.FP16:
            return self.builder.fpext(raw, self.of(F32))
        wide = self.builder.zext(raw, self.of(I32))
        return self.builder.bitcast(self.shift_left(wide, 16), self.of(F32))

    def encode(self, kind: Float, value: Value) -> Value:
        if kind is Float.FP32:
            return value
        if kind is Float.FP16:
            return self.builder.fptrunc(value, self.of(F16))
        # In integers, since AVX-512's own conversion flushes denormals.
        bits = self.bits_or_nan(value)
        odd = self.builder.and_(self.shift_right(bits, 16), self.constant(I32, 1))
        half = self.builder.add(odd, self.constant(I32, 0x7FFF))
        return self.high_half(self.builder.add(bits, half))

    def join(self, high: Value, low: Value) -> Value:
        """fp32 from a split master: (high << 16) + low, low being signed."""
        wide = self.shift_left(self.builder.zext(high, self.of(I32)), 16)
        bits = self.builder.add(wide, self.builder.sext(low, self.of(I32)))
        return self.builder.bitcast(bits, self.of(F32))

    def split(self, value: Value) -> tuple[Value, Value]:
        """The (high, low) halves of a split master: high rounds half up, low is what is left."""
        bits = self.bits_or_nan(value)
        high = self.high_half(self.builder.add(bits, self.constant(I32, 0x8000)))
        return high, self.builder.trunc(bits, self.of(I16))

    def bits_or_nan(self, value: Value) -> Value:
        """fp32 bits, any NaN made canonical: rounding up another one can carry into the sign."""
        bits = self.builder.bitcast(value, self.of(I32))
        unordered = self.builder.fcmp_unordered("uno", value, value)
        return self.builder.select(unordered, self.constant(I32, NAN_BITS), bits)

    def high_half(self, bits: Value) -> Value:
        return self.builder.trunc(self.shift_right(bits, 16), self.of(I16))

    def shift_left(self, value: Value, count: int) -> Value:
        return self.builder.shl(value, self.constant(I32, count))

    def shift_right(self, value: Value, count: int) -> Value:
        return self.builder.lshr(value, self.constant(I32, count))

    def mul(self, a: Value, b: Value) -> Value:
        return self.builder.fmul(a, b)

    def div(self, a: Value, b: Value) -> Value:
        return self.builder.fdiv(a, b)

    def neg(self, a: Value) -> Value:
        return self.builder.fneg(a)

    def add(self, a: Value, b: Value) -> Value:
        return self.builder.fadd(a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self._intrinsic("llvm.fma", a, b, c)

    def sqrt(self, a: Value) -> Value:
        return self._intrinsic("llvm.sqrt", a)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger; b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def widen(self, value: Value) -> Value:
        """fp32 to fp64 (exact)."""
        return self.builder.fpext(value, self.of(F64))

    def _at(self, scalar: ir.Type, base: Value, index: Value) -> Value:
        element = self.builder.bitcast(base, scalar.as_pointer())
        pointer = self.builder.gep(element, [index])
        return self.builder.bitcast(pointer, self.of(scalar).as_pointer())

    def _intrinsic(self, name: str, *args: Value) -> Value:
        kind = args[0].type
        scalar = "f64" if kind.element == F64 else "f32"
        signature = ir.FunctionType(kind, [kind] * len(args))
        function = cgutils.get_or_insert_function(
            self.builder.module, signature, f"{name}.v{self.width}{scalar}"
        )
        return self.builder.call(function, args)


# Emits the work on one vector at an index. It yields where the other vectors of the burst should
# catch up: after its loads, and before its stores.
Step = Callable[[Lanes, Value], Iterator[None]]


def sweep(builder: ir.IRBuilder, lo: Value, hi: Value, burst: int, step: Step) -> None:
    """Emit loops of `step` over [lo, hi): bursts of several vectors, single vectors, elements."""
    for span, width in dict.fromkeys([(burst, WIDTH), (WIDTH, WIDTH), (1, 1)]):
        lo = _loop(builder, lo, hi, span, width, step)


def _loop(builder: ir.IRBuilder, lo: Value, hi: Value, span: int, width: int, step: Step) -> Value:
    """Emit `step` on every whole `span` of elements in [lo, hi); return where they end."""
    end = builder.sub(hi, builder.urem(builder.sub(hi, lo), I64(span)))
    with cgutils.for_range_slice(builder, lo, end, I64(span), I64) as (index, _):
        lanes = Lanes(builder, width)
        starts = [builder.add(index, I64(offset)) for offset in range(0, span, width)]
        interleave([step(lanes, start) for start in starts])
    return end


def interleave(steps: Sequence[Iterator[None]]) -> None:
    """Run generators side by side, from yield to yield, until all have ended."""
    for _ in zip_longest(*steps):
        pass


def _alignment(scalar: ir.Type) -> int:
    return {I16: 2, F16: 2, I32: 4, F32: 4, F64: 8}[scalar]
