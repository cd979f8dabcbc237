"""Vector arithmetic in LLVM IR, for kernels whose bits must not depend on how a loop was cut.

The usual way to a fast loop, leaving it to the auto-vectoriser, gives no say in where a multiply
and an add become one fused operation: the vector body, the scalar tail and another CPU may each
decide differently. Here the operations are written out. `Lanes` emits them for `width` neighbouring
elements; the tail is the same code at width 1; nothing carries a fast-math flag. So an element's
bits follow from the sequence of IEEE 754 operations alone: fused multiply-add, multiply, divide and
square root, each rounded once, to nearest even. They assume the default floating-point environment
(denormals kept: under flush-to-zero the bits are not guaranteed).

`sweep` emits loops over all whole vectors first, several side by side, and then over what is left,
element by element, with the same emitting functions.

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

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
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
        return ir.VectorType(scalar, self.width)

    def constant(self, scalar: ir.Type, value: float) -> Value:
        return self.constants(scalar, [value] * self.width)

    def constants(self, scalar: ir.Type, values: Sequence[float]) -> Value:
        """One constant per lane; integers of 32 bits may be given unsigned."""
        if scalar == I32:
            values = [int(value) - ((int(value) & 0x80000000) << 1) for value in values]
        return ir.Constant(self.of(scalar), list(values))

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

    def store_bf16(self, bits: Value, base: Value, index: Value) -> None:
        """The high halves of fp32 bits in i32 lanes, as bf16."""
        self.store_raw(self.high_half(bits), base, index)

    def load_split(self, high: Value, low: Value, index: Value) -> Value:
        """fp32 from the two arrays of a split master."""
        return self.join(self.load_raw(I16, high, index), self.load_raw(I16, low, index))

    def store_split(self, value: Value, high: Value, low: Value, index: Value) -> None:
        """fp32 lanes into the two arrays of a split master."""
        upper, lower = self.split(value)
        self.store_raw(upper, high, index)
        self.store_raw(lower, low, index)

    def load_code(self, base: Value, index: Value) -> Value:
        """Bytes, in a form that `code_bits` takes bits from."""
        return self.builder.zext(self.load_raw(I8, base, index), self.of(I32))

    def code_bits(self, code: Value, mask: int, shift: int) -> Value:
        """The bits of each byte that are in `mask`, moved left by `shift` in i32 lanes."""
        moved = self.shift_left(code, shift)
        return self.builder.and_(moved, self.constant(I32, mask << shift))

    def store_code(self, code: Value, keep: Value, base: Value, index: Value) -> None:
        """The low bytes of i32 lanes, all of them & `keep` (an i8 scalar)."""
        narrow = self.builder.trunc(code, self.of(I8))
        self.store_raw(self.builder.and_(narrow, self.splat(keep)), base, index)

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
        return self.split_bits(self.bits_or_nan(value))

    def split_bits(self, bits: Value) -> tuple[Value, Value]:
        """The halves of which `join` makes these bits; the high one of a NaN may be no NaN."""
        high = self.high_half(self.builder.add(bits, self.constant(I32, 0x8000)))
        return high, self.builder.trunc(bits, self.of(I16))

    def bits_or_nan(self, value: Value) -> Value:
        """fp32 bits, any NaN made canonical: rounding up another one can carry into the sign."""
        bits = self.builder.bitcast(value, self.of(I32))
        unordered = self.builder.fcmp_unordered("uno", value, value)
        return self.builder.select(unordered, self.constant(I32, NAN_BITS), bits)

    def add_noise(self, value: Value, noise: Value, *, signed: bool = True) -> Value:
        """fp32 bits whose high halves are `value` in bf16, rounded stochastically.

        `noise` are 16 random bits in i32 lanes (`kernels.cpu.noise`). A value that is not `signed`
        is at least 0, or a quiet NaN, as all arithmetic makes them.
        """
        if signed:
            return self.builder.add(self.bits_or_nan(value), noise)
        bits = self.builder.bitcast(value, self.of(I32))
        return self.builder.add(self.unsigned_min(bits, self.constant(I32, NAN_BITS)), noise)

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
        """The larger value; b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def sign(self, a: Value) -> Value:
        """The sign, 1 or -1; a itself where it is zero or NaN."""
        one, minus_one = self.constant(F32, 1.0), self.constant(F32, -1.0)
        zero = self.constant(F32, 0.0)
        negative = self.builder.select(self.builder.fcmp_ordered("<", a, zero), minus_one, a)
        return self.builder.select(self.builder.fcmp_ordered(">", a, zero), one, negative)

    def magnitude_bits(self, value: Value) -> Value:
        """fp32 bits without their sign: ordered like the magnitudes, a NaN above infinity."""
        bits = self.builder.bitcast(value, self.of(I32))
        return self.builder.and_(bits, self.constant(I32, 0x7FFFFFFF))

    def unsigned_max(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_unsigned(">", a, b), a, b)

    def unsigned_min(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_unsigned("<", a, b), a, b)

    def largest(self, a: Value) -> Value:
        """The largest value of all lanes (unsigned i32), a scalar."""
        if self.width == 1:
            return self.builder.extract_element(a, ir.Constant(I32, 0))
        signature = ir.FunctionType(I32, [a.type])
        name = f"llvm.vector.reduce.umax.v{self.width}i32"
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return self.builder.call(function, [a])

    def count(self, mask: Value) -> Value:
        """The number of lanes whose bit is set, i64."""
        packed = self.builder.bitcast(mask, ir.IntType(self.width))
        return self.builder.ctpop(self.builder.zext(packed, I64))

    def compressed(self, value: Value, mask: Value) -> Value:
        """The lanes whose bit is set, side by side from the first lane on; others are undefined."""
        if self.width == 1:
            return value
        rest = ir.Constant(value.type, ir.Undefined)
        return self._intrinsic("llvm.experimental.vector.compress", value, mask, rest)

    def expanded(self, value: Value, mask: Value, base: Value, index: Value) -> Value:
        """i32 elements from index on in the lanes whose bit is set, `value` in the others."""
        start = self.builder.gep(self.builder.bitcast(base, I32.as_pointer()), [index])
        return self._intrinsic("llvm.masked.expandload", start, mask, value)

    def sum_of(self, a: Value) -> Value:
        """The sum of WIDTH lanes, added in halves: i and i + 8, i and i + 4, and so on."""
        width = WIDTH
        while width > 1:
            width //= 2
            halves = (self.shuffled(a, a, range(at, at + width)) for at in (0, width))
            a = self.builder.fadd(*halves)
        return self.builder.extract_element(a, I32(0))

    def shuffled(self, a: Value, b: Value, places: Sequence[int]) -> Value:
        """The lanes at `places` of a and, behind its own, of b."""
        mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
        return self.builder.shuffle_vector(a, b, mask)

    def widen(self, value: Value) -> Value:
        """fp32 to fp64 (exact)."""
        return self.builder.fpext(value, self.of(F64))

    def _at(self, scalar: ir.Type, base: Value, index: Value) -> Value:
        element = self.builder.bitcast(base, scalar.as_pointer())
        pointer = self.builder.gep(element, [index])
        return self.builder.bitcast(pointer, self.of(scalar).as_pointer())

    def _intrinsic(self, name: str, *args: Value) -> Value:
        kind = args[-1].type
        scalar = kind.element.intrinsic_name
        signature = ir.FunctionType(kind, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(
            self.builder.module, signature, f"{name}.v{self.width}{scalar}"
        )
        return self.builder.call(function, args)


def _alignment(scalar: ir.Type) -> int:
    return {I8: 1, I16: 2, F16: 2, I32: 4, F32: 4, F64: 8}[scalar]


# Emits the work on one vector at an index. It yields where the other vectors of the burst should
# catch up: after its loads, and before its stores.
Step = Callable[[Lanes, Value], Iterator[None]]


def sweep(builder: ir.IRBuilder, lo: Value, hi: Value, burst: int, step: Step) -> None:
    """Emit loops of `step` over [lo, hi): bursts of several vectors, single vectors, elements."""
    wide, single = Lanes(builder, WIDTH), Lanes(builder, 1)
    for span, vector in dict.fromkeys([(burst, wide), (WIDTH, wide), (1, single)]):
        end = builder.sub(hi, builder.urem(builder.sub(hi, lo), I64(span)))
        with cgutils.for_range_slice(builder, lo, end, I64(span), I64) as (index, _):
            starts = [builder.add(index, I64(offset)) for offset in range(0, span, vector.width)]
            interleave([step(vector, start) for start in starts])
        lo = end


def interleave(steps: Sequence[Iterator[None]]) -> None:
    """Run generators side by side, from yield to yield, until all have ended."""
    for _ in zip_longest(*steps):
        pass
