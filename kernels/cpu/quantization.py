"""Weights in 8 and 4 bits: groups of consecutive elements with one scale each.

A group has a 32-bit word and a code per element. A code q stands, in fp32, for

    INT8   q * s                q from -127 to 127, an int8; the word has the bits of s
    INT4   (q - z) * s          q from 0 to 15; the word's low 4 bits are z, the others those of s
    NF4    NF4_LEVELS[q] * s    q from 0 to 15; the word has the bits of s

rounded to nearest even in the format asked for. INT4 is kept within the largest finite numbers of
that format; the product is exact before. Two codes share a byte: of INT4 the first one has the low
bits, of NF4 the high ones, as in bitsandbytes.

Quantization takes two magnitudes of a group as integers, the largest of those that are not negative
and of those that are (fp32 bits without their sign are ordered like the numbers, a NaN above
infinity; zero always counts):

    up = max(x, 0),  down = max(-x, 0)

    INT8   s = max(up, down) / 127, its low 7 bits cleared
    INT4   r = (up / 16 + down / 16) * (16 / 15), s = r rounded to 7 significant bits, half up;
           the next smaller such number if rint(up / s) + rint(down / s) < 15;  z = rint(down / s)
    NF4    s = max(up, down)

each operation rounded to fp32, rint to nearest even, s at least 2**-100. Then per element

    INT8   q = rint(x / s)
    INT4   q = rint(x / s) + z, kept within 0 .. 15
    NF4    q = how many of the 15 midpoints between levels are less than x / s

A group with an infinity or a NaN gets the NaN 0x7fc00000 as its word and codes of z = 0 (of 7 in
NF4), and reads as NaN everywhere.

Guarantees. Zero stays zero (of pruned weights). Every value is within s / 2 of what is stored (NF4:
half of the widest gap, 0.152 s), but the ends of an INT4 group within s. In INT8 and NF4 a group's
largest magnitude is kept exactly in the format that it came from, 127 * s or s, and in INT4 the
first and the last code are both in use; so s follows from the dequantized values and quantizing
those again gives the same ones: dequantize(quantize(dequantize(c))) == dequantize(c), in fp32, bf16
and fp16, if quantize made c from that format. (Not in INT4 where a group reaches 0.97 times the
largest finite number, nor where its fp16 values are below 2**-14.)

That 7 bits are enough for INT4's scale: the mean squared error over groups of 64 normal numbers is
1.03 times that of exact ends with a floating-point offset, and 1.08 times the least of any scale.

INT4 is what `torch._weight_int4pack_mm_for_cpu` multiplies: (q - 8) * s + (8 - z) * s. Levels of
NF4: Dettmers et al., "QLoRA" (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, reduce
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from offload.kernels import weight_formats as formats
from offload.kernels.cpu import jit
from offload.kernels.cpu.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    NAN_BITS,
    WIDTH,
    Lanes,
    Value,
    has_wide_registers,
)
from offload.kernels.floats import Array, Float, Runner, check_input, check_output, numel_of, serial
from offload.kernels.weight_formats import GROUP_SIZES, LINE_NBYTES, QuantType, WeightFormat

_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, in the low bits of the sum
_MAGIC_BITS = 0x4B400000
_INF_BITS = 0x7F800000
_UINT8 = np.dtype(np.uint8)
_UINT32 = np.dtype(np.uint32)


class Action(IntEnum):
    QUANTIZE = 0
    DEQUANTIZE = 1


def quantize_weights(
    values: Array, words: Array, codes: Array, weights: WeightFormat, values_float: Float,
    run: Runner = serial,
) -> None:  # fmt: skip
    """Quantize `values` (numel,) of `values_float`: uint32 `words` (groups,), uint8 `codes`."""
    groups = _groups(values, weights)
    check_input("values", values, values_float.storage, values.size)
    check_output("words", words, _UINT32, groups)
    check_output("codes", codes, _UINT8, weights.codes_nbytes(values.size))
    loop = kernel(Action.QUANTIZE, weights, values_float)
    run(partial(loop, values, words, codes), groups)


def dequantize_weights(
    words: Array, codes: Array, values: Array, weights: WeightFormat, values_float: Float,
    run: Runner = serial,
) -> None:  # fmt: skip
    """Fill `values` (numel,) of `values_float` from what `quantize_weights` wrote."""
    groups = _groups(values, weights)
    check_input("words", words, _UINT32, groups)
    check_input("codes", codes, _UINT8, weights.codes_nbytes(values.size))
    check_output("values", values, values_float.storage, values.size)
    loop = kernel(Action.DEQUANTIZE, weights, values_float)
    run(partial(loop, values, words, codes), groups)


def _groups(values: Array, weights: WeightFormat) -> int:
    groups, rest = divmod(numel_of("values", values), weights.group_size)
    if rest:
        raise ValueError(
            f"values: {values.size} elements are no whole groups of {weights.group_size}"
        )
    return groups


def kernel(action: Action, weights: WeightFormat, kind: Float) -> jit.Kernel:
    """kernel(values, words, codes, lo, hi), where lo and hi count groups."""
    size = GROUP_SIZES.index(weights.group_size)
    return _kernel(action | weights.quant_type << 1 | kind << 3 | size << 5)


def _emit(builder: ir.IRBuilder, code: int, arrays: Any, lo: Value, hi: Value) -> None:
    action, kind = Action(code & 1), Float(code >> 3 & 3)
    weights = WeightFormat(QuantType(code >> 1 & 3), GROUP_SIZES[code >> 5])
    at = Pointers(*(array.data for array in arrays))
    if action is Action.QUANTIZE:
        with cgutils.for_range_slice(builder, lo, hi, I64(1), I64) as (number, _):
            _quantize_group(CodeLanes(builder), weights, kind, at, number)
        return
    line = builder.and_(builder.ptrtoint(at.values, I64), I64(LINE_NBYTES - 1))
    with builder.if_else(builder.icmp_unsigned("==", line, I64(0))) as (aligned, unaligned):
        for path, streams in ((aligned, True), (unaligned, False)):
            with path, cgutils.for_range_slice(builder, lo, hi, I64(1), I64) as (number, _):
                _dequantize_group(CodeLanes(builder), weights, kind, at, number, streams)
    builder.fence("seq_cst")  # other threads read what was written past the caches


_kernel = jit.kernels_of(_emit, jit.digest(__file__, "weight_formats.py"))


@dataclass(frozen=True, slots=True)
class Pointers:
    values: Value
    words: Value
    codes: Value


class CodeLanes(Lanes):
    """Vectors of WIDTH elements, and the two ways of packing codes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        super().__init__(builder, WIDTH)

    def lookup(self, table: Value, index: Value) -> Value:
        """Lanes of a table of 16 i32, by the low 4 bits of `index`."""
        builder = self.builder
        if has_wide_registers():
            return self._call("llvm.x86.avx512.permvar.si.512", table, index)
        if not llvm.get_host_cpu_features().get("avx2"):
            return self._taken(table, index)
        half = WIDTH // 2
        parts = [slice(0, half), slice(half, WIDTH)]
        low, high = (self.shuffled(table, table, range(WIDTH)[part]) for part in parts)
        halves = []
        for part in parts:
            lanes = self.shuffled(index, index, range(WIDTH)[part])
            either = [self._call("llvm.x86.avx2.permd", each, lanes) for each in (high, low)]
            sign = builder.shl(lanes, ir.Constant(lanes.type, [28] * half))  # bit 3
            is_high = builder.icmp_signed("<", sign, ir.Constant(lanes.type, [0] * half))
            halves.append(builder.select(is_high, *either))
        return self.shuffled(halves[0], halves[1], range(WIDTH))

    def _call(self, name: str, table: Value, index: Value) -> Value:
        """Emit the CPU's instruction itself: a pattern for it does not survive the compiler."""
        signature = ir.FunctionType(table.type, [table.type, index.type])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return self.builder.call(function, [table, index])

    def _taken(self, table: Value, index: Value) -> Value:
        """Look the table up lane by lane."""
        inside = self.builder.and_(index, self.constant(I32, 15))
        lanes = ir.Constant(table.type, ir.Undefined)
        for lane in range(WIDTH):
            place = self.builder.extract_element(inside, I32(lane))
            value = self.builder.extract_element(table, place)
            lanes = self.builder.insert_element(lanes, value, I32(lane))
        return lanes

    def load_pairs(self, base: Value, index: Value, quant: QuantType) -> tuple[Value, Value]:
        """Load two vectors of 4-bit codes, in the low bits of i32 lanes: of elements index, index +
        2 .. index + 30, and of those behind each, with which they share a byte."""
        start = self.builder.lshr(index, I64(1))
        low = self.builder.zext(self.load_raw(I8, base, start), self.of(I32))
        high = self.shift_right(low, 4)
        return (low, high) if quant is QuantType.INT4 else (high, low)

    def load_spread(self, base: Value, index: Value, quant: QuantType) -> Value:
        """Load 4-bit codes index .. index + 16, in the low bits of i32 lanes; others undefined."""
        builder, half = self.builder, WIDTH // 2
        start = builder.gep(base, [builder.lshr(index, I64(1))])
        pointer = builder.bitcast(start, ir.VectorType(I8, half).as_pointer())
        wide = ir.VectorType(I64, half)
        raw = builder.zext(builder.load(pointer, align=8), wide)
        # a byte b becomes the lanes (b, b >> 4), or in NF4 (b >> 4, b): little-endian halves
        if quant is QuantType.INT4:
            lanes = builder.or_(raw, builder.shl(raw, ir.Constant(wide, [28] * half)))
        else:
            upper = builder.shl(raw, ir.Constant(wide, [32] * half))
            lanes = builder.or_(builder.lshr(raw, ir.Constant(wide, [4] * half)), upper)
        return builder.bitcast(lanes, self.of(I32))

    def store_pairs(self, lanes: Value, base: Value, index: Value, quant: QuantType) -> None:
        """Store codes from lanes without other bits; the reverse of `load_spread`."""
        builder, half = self.builder, WIDTH // 2
        narrow = builder.bitcast(
            builder.trunc(lanes, self.of(I8)), ir.VectorType(I16, half)
        )  # of each pair the first one is the low byte
        first, second = (4, 8) if quant is QuantType.NF4 else (0, 4)
        pair = builder.or_(
            builder.shl(narrow, ir.Constant(narrow.type, [first] * half)),
            builder.lshr(narrow, ir.Constant(narrow.type, [second] * half)),
        )
        start = builder.gep(base, [builder.lshr(index, I64(1))])
        pointer = builder.bitcast(start, ir.VectorType(I8, half).as_pointer())
        builder.store(builder.trunc(pair, ir.VectorType(I8, half)), pointer, align=8)

    def stored_bits(self, kind: Float, value: Value) -> Value:
        """Round fp32 to a format; its bits are in the low ones of i32 lanes."""
        stored = self.encode(kind, value)
        if kind is Float.FP32:
            return self.builder.bitcast(stored, self.of(I32))
        return self.builder.zext(self.builder.bitcast(stored, self.of(I16)), self.of(I32))

    def rounded(self, value: Value) -> Value:
        """Round fp32 below 2**22 in magnitude to the nearest integer (i32), ties to even."""
        moved = self.add(value, self.constant(F32, _MAGIC))
        return self.builder.sub(
            self.builder.bitcast(moved, self.of(I32)), self.constant(I32, _MAGIC_BITS)
        )

    def signed_max(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def signed_min(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)


def _dequantize_group(
    vector: CodeLanes, weights: WeightFormat, kind: Float, at: Pointers, number: Value,
    streams: bool,
) -> None:  # fmt: skip
    """Dequantize a group. `streams`: values lie on cache lines, and are written past the caches,
    which are too small for a group's parameters."""
    builder = vector.builder
    word = builder.load(builder.gep(at.words, [number]), align=4)
    first = builder.mul(number, I64(weights.group_size))
    line = _line_of_values(vector, weights.quant_type, kind, at.codes, word)
    past_caches = builder.module.add_metadata([I32(1)])
    for offset in range(0, weights.group_size, LINE_NBYTES // kind.nbytes):
        start = builder.add(first, I64(offset))
        whole = line(start)
        element = whole.type.element if kind is Float.FP32 else I16
        pointer = builder.gep(builder.bitcast(at.values, element.as_pointer()), [start])
        target = builder.bitcast(pointer, whole.type.as_pointer())
        store = builder.store(whole, target, align=LINE_NBYTES if streams else kind.nbytes)
        if streams:
            store.set_metadata("nontemporal", past_caches)


def _line_of_values(
    vector: CodeLanes, quant: QuantType, kind: Float, codes: Value, word: Value
) -> Callable[[Value], Value]:
    """A function that emits one cache line of stored values, starting at an index."""
    builder = vector.builder
    if quant is QuantType.INT8:

        def from_bytes(start: Value) -> Value:
            return vector.encode(kind, signed_bytes(vector, word, codes, start))

        if kind is Float.FP32:
            return from_bytes
        return lambda start: vector.shuffled(
            from_bytes(start), from_bytes(builder.add(start, I64(WIDTH))), range(2 * WIDTH)
        )
    table = vector.stored_bits(kind, levels(vector, quant, kind, word))
    if kind is Float.FP32:
        return lambda start: vector.lookup(table, vector.load_spread(codes, start, quant))
    shifted = vector.shift_left(table, 16)

    def from_pairs(start: Value) -> Value:
        """Emit two values of 16 bits from each byte, which stay side by side."""
        first, second = vector.load_pairs(codes, start, quant)
        return builder.or_(vector.lookup(table, first), vector.lookup(shifted, second))

    return from_pairs


def levels(vector: CodeLanes, quant: QuantType, kind: Float, word: Value) -> Value:
    """Emit the values of the 16 codes of a group (fp32 lanes), before they are rounded."""
    builder = vector.builder
    if quant is QuantType.NF4:
        scale = vector.splat(builder.bitcast(word, F32))
        return vector.mul(vector.constants(F32, formats.NF4_LEVELS), scale)
    zero = vector.splat(builder.and_(word, I32(15)))
    scale = vector.splat(builder.bitcast(builder.and_(word, I32(-16)), F32))
    steps = builder.sub(vector.constants(I32, range(16)), zero)
    value = vector.mul(builder.sitofp(steps, vector.of(F32)), scale)
    return _within(vector, value, formats.LARGEST[kind])


def signed_bytes(vector: CodeLanes, word: Value, codes: Value, start: Value) -> Value:
    """Emit the values of the INT8 codes from an index on, before they are rounded."""
    builder = vector.builder
    raw = builder.sext(vector.load_raw(I8, codes, start), vector.of(I32))
    scale = vector.splat(builder.bitcast(word, F32))
    return vector.mul(builder.sitofp(raw, vector.of(F32)), scale)


def _within(vector: Lanes, value: Value, limit: float) -> Value:
    """Emit a clamp to [-limit, limit]; a NaN stays one."""
    upper, lower = vector.constant(F32, limit), vector.constant(F32, -limit)
    builder = vector.builder
    value = builder.select(builder.fcmp_ordered(">", value, upper), upper, value)
    return builder.select(builder.fcmp_ordered("<", value, lower), lower, value)


def _quantize_group(
    vector: CodeLanes, weights: WeightFormat, kind: Float, at: Pointers, number: Value
) -> None:
    builder = vector.builder
    first = builder.mul(number, I64(weights.group_size))
    starts = [builder.add(first, I64(i)) for i in range(0, weights.group_size, WIDTH)]
    loaded = [vector.load(kind, at.values, start) for start in starts]
    up, down = _extremes(vector, loaded)
    finite = builder.and_(
        *(builder.icmp_unsigned("<", each, I32(_INF_BITS)) for each in (up, down))
    )
    scale_bits, zero = _scale(vector, weights.quant_type, up, down)
    word = builder.select(finite, builder.or_(scale_bits, zero), I32(NAN_BITS))
    builder.store(word, builder.gep(at.words, [number]), align=4)
    zero = vector.splat(builder.select(finite, zero, I32(0)))
    keep = vector.splat(builder.select(finite, I32(-1), I32(0)))  # else codes of zeros
    divisor = builder.select(finite, scale_bits, I32(formats.MIN_SCALE_BITS))
    scale = vector.splat(builder.bitcast(divisor, F32))
    for start, value in zip(starts, loaded, strict=True):
        bits = builder.and_(builder.bitcast(value, vector.of(I32)), keep)
        ratio = vector.div(builder.bitcast(bits, vector.of(F32)), scale)
        if weights.quant_type is QuantType.INT8:
            vector.store_raw(builder.trunc(vector.rounded(ratio), vector.of(I8)), at.codes, start)
        elif weights.quant_type is QuantType.INT4:
            shifted = builder.add(vector.rounded(ratio), zero)
            inside = vector.signed_max(shifted, vector.constant(I32, 0))
            inside = vector.signed_min(inside, vector.constant(I32, 15))
            vector.store_pairs(inside, at.codes, start, weights.quant_type)
        else:
            vector.store_pairs(_nf4(vector, ratio), at.codes, start, weights.quant_type)


def _nf4(vector: CodeLanes, ratio: Value) -> Value:
    """Emit the code: the number of midpoints that are less than `ratio`."""
    count = vector.constant(I32, 0)
    for midpoint in formats.NF4_MIDPOINTS:
        less = vector.builder.fcmp_ordered(">", ratio, vector.constant(F32, midpoint))
        count = vector.builder.sub(count, vector.builder.sext(less, vector.of(I32)))
    return count


def _extremes(vector: CodeLanes, loaded: Sequence[Value]) -> tuple[Value, Value]:
    """Bits of the largest x and of the largest -x, or of zero; scalars.

    Bits with a sign are less than zero as integers: what has the other sign drops out.
    """
    builder = vector.builder
    ups = [builder.bitcast(value, vector.of(I32)) for value in loaded]
    sign = vector.constant(I32, 0x80000000)
    downs = [builder.xor(bits, sign) for bits in ups]
    # lanes of which none is negative
    up, down = (reduce(vector.signed_max, each, vector.constant(I32, 0)) for each in (ups, downs))
    return vector.largest(up), vector.largest(down)


def _scale(vector: CodeLanes, quant: QuantType, up: Value, down: Value) -> tuple[Value, Value]:
    """Bits of a group's scale, and z of INT4 (else 0); scalars, of use where all is finite."""
    builder = vector.builder
    largest = vector.signed_max(up, down)
    if quant is QuantType.NF4:
        return vector.signed_max(largest, I32(formats.MIN_SCALE_BITS)), I32(0)
    if quant is QuantType.INT8:
        step = builder.fdiv(builder.bitcast(largest, F32), F32(127.0))
        bits = builder.and_(builder.bitcast(step, I32), I32(formats.INT8_SCALE_MASK - (1 << 32)))
        return vector.signed_max(bits, I32(formats.MIN_SCALE_BITS)), I32(0)
    above, below = builder.bitcast(up, F32), builder.bitcast(down, F32)
    sixteenths = [builder.fmul(each, F32(0.0625)) for each in (above, below)]
    step = builder.fmul(builder.fadd(*sixteenths), F32(formats.SIXTEEN_FIFTEENTHS))
    half = I32(formats.GRID_STEP_BITS // 2)
    bits = builder.and_(builder.add(builder.bitcast(step, I32), half), I32(-formats.GRID_STEP_BITS))
    bits = vector.signed_max(bits, I32(formats.MIN_SCALE_BITS))
    steps = [_rounded_steps(builder, each, bits) for each in (above, below)]
    short = builder.icmp_signed("<", builder.add(*steps), I32(15))
    lower = vector.signed_max(
        builder.sub(bits, I32(formats.GRID_STEP_BITS)), I32(formats.MIN_SCALE_BITS)
    )
    bits = builder.select(short, lower, bits)
    zero = _rounded_steps(builder, below, bits)
    return bits, builder.select(builder.icmp_signed("<", zero, I32(15)), zero, I32(15))


def _rounded_steps(builder: ir.IRBuilder, distance: Value, scale_bits: Value) -> Value:
    moved = builder.fadd(builder.fdiv(distance, builder.bitcast(scale_bits, F32)), F32(_MAGIC))
    return builder.sub(builder.bitcast(moved, I32), I32(_MAGIC_BITS))
