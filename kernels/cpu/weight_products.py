"""Products with weights in 8 and 4 bits, straight from their codes: for few rows of x.

    out[m, n] = sum over k of x[m, k] * w[n, k]        x (M, K), w (N, K), fp32 sums

w are the values that `kernels.cpu.quantization` dequantizes to, in registers and nowhere else: for
MAX_ROWS rows of x a half to a quarter of the time of dequantizing and a product by PyTorch
(benchmarks/records/kernels.md).

The order of a sum is fixed. It has 16 lanes. K is cut into spans of 32, and a lane gets two
elements of each, one after the other, by fused multiply-adds:

    lane i    INT8: elements i, 16 + i        INT4, NF4: elements 2 i, 2 i + 1

At the end the lanes are added in halves: i and i + 8, i and i + 4, i and i + 2, the last two. So
the bits of a sum depend on its row of x and its row of w alone.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from offload.kernels.cpu import jit
from offload.kernels.cpu.lanes import F32, I32, I64, WIDTH, Value
from offload.kernels.cpu.quantization import CodeLanes, Pointers, levels, signed_bytes
from offload.kernels.floats import Array, Float, Runner, check_input, check_output, serial
from offload.kernels.weight_formats import GROUP_SIZES, QuantType, WeightFormat

MAX_ROWS = 4  # of x for which this is the faster way
SPAN = 2 * WIDTH
_ROWS = 8  # of w, of which threads take whole multiples
_FP32 = np.dtype(np.float32)
_DIGEST = jit.digest(__file__, "cpu/quantization.py", "weight_formats.py")


def in_lane_order(x: Array, weights: WeightFormat) -> Array:
    """fp32 x (M, K) as `multiply` takes it: elements that share a byte apart, span by span."""
    if weights.quant_type is QuantType.INT8:
        return np.ascontiguousarray(x)
    spans = x.reshape(len(x), x.shape[1] // SPAN, WIDTH, 2)
    return np.ascontiguousarray(spans.transpose(0, 1, 3, 2)).reshape(x.shape)


def multiply(
    x: Array, words: Array, codes: Array, out: Array, weights: WeightFormat, kind: Float,
    run: Runner = serial,
) -> None:  # fmt: skip
    """Fill `out` (M, N) fp32 with the products of `x` (M, K) fp32, from `in_lane_order`, and
    weights (N, K), quantized from `kind`."""
    (rows, inner), columns = x.shape, out.shape[1]
    if out.shape[0] != rows or inner % weights.group_size:
        raise ValueError(
            f"x, out: expected rows of whole groups of {weights.group_size} and as many of both, "
            f"got shapes {x.shape} and {out.shape}"
        )
    check_input("x", x.reshape(-1), _FP32, rows * inner)
    check_output("out", out.reshape(-1), _FP32, rows * columns)
    check_input("words", words, np.dtype(np.uint32), columns * inner // weights.group_size)
    check_input("codes", codes, np.dtype(np.uint8), weights.codes_nbytes(columns * inner))
    loop = _kernel(weights.quant_type | kind << 2 | GROUP_SIZES.index(weights.group_size) << 4)
    body = partial(loop, x.reshape(-1), words, codes, out.reshape(-1), rows, columns, inner)
    run(body, -(-columns // _ROWS))


@cache
def _kernel(code: int) -> jit.Kernel:
    """kernel(x, words, codes, out, rows, columns, inner, lo, hi); lo, hi count _ROWS rows of w."""
    plan = jit.plan(code, _DIGEST)

    def products(x, words, codes, out, rows, columns, inner, lo, hi):  # type: ignore[no-untyped-def]
        _multiply(plan, x, words, codes, out, rows, columns, inner, lo, hi)

    return jit.compiled(products)


@intrinsic(prefer_literal=True)
def _multiply(typing, plan, x, words, codes, out, rows, columns, inner, lo, hi):  # type: ignore[no-untyped-def]
    code = jit.variant_of(plan)
    if code is None:
        return None
    weights, kind = WeightFormat(QuantType(code & 3), GROUP_SIZES[code >> 4]), Float(code >> 2 & 3)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        at = jit.pointers(context, builder, signature, args, 1, 5)
        numbers = jit.integers(context, builder, signature, args, 5, 10)
        _Products(builder, weights, kind, *at, *numbers[:3]).emit(*numbers[3:])
        return context.get_dummy_value()

    args = (plan, x, words, codes, out, rows, columns, inner, lo, hi)
    return jit.returns_nothing(*args), emit


class _Products:
    """Emits the loops: rows of w, rows of x, groups."""

    def __init__(
        self, builder: ir.IRBuilder, weights: WeightFormat, kind: Float, x: Value, words: Value,
        codes: Value, out: Value, rows: Value, columns: Value, inner: Value,
    ) -> None:  # fmt: skip
        self.builder, self.vector = builder, CodeLanes(builder)
        self.weights, self.kind = weights, kind
        self.x, self.at, self.out = x, Pointers(x, words, codes), out
        self.rows, self.columns, self.inner = rows, columns, inner

    def emit(self, lo: Value, hi: Value) -> None:
        builder = self.builder
        first, limit = (builder.mul(each, I64(_ROWS)) for each in (lo, hi))
        last = builder.select(builder.icmp_signed("<", limit, self.columns), limit, self.columns)
        # rows side by side share what is loaded; as many sums as registers have room for
        done = I64(0)
        for rows, columns in ((4, 4), (2, 4), (1, 8)):
            end = builder.sub(self.rows, builder.urem(builder.sub(self.rows, done), I64(rows)))
            for n, side_by_side in self._steps(first, last, (columns, 1)):
                for m, _ in self._steps(done, end, (rows,)):
                    self._block(n, side_by_side, m, rows)
            done = end

    def _steps(self, lo: Value, hi: Value, spans: tuple[int, ...]) -> Any:
        """Loops over [lo, hi) in steps of the first span, then of the next."""
        builder = self.builder
        for span in spans:
            end = builder.sub(hi, builder.urem(builder.sub(hi, lo), I64(span)))
            with cgutils.for_range_slice(builder, lo, end, I64(span), I64) as (index, _):
                yield index, span
            lo = end

    def _block(self, n: Value, columns: int, m: Value, rows: int) -> None:
        """The sums of some rows of w with some of x."""
        builder, vector, size = self.builder, self.vector, self.weights.group_size
        places = [(c, r) for c in range(columns) for r in range(rows)]
        sums = {place: cgutils.alloca_once(builder, vector.of(F32)) for place in places}
        for total in sums.values():
            builder.store(vector.constant(F32, 0.0), total)
        starts = [builder.mul(builder.add(n, I64(c)), self.inner) for c in range(columns)]
        inputs = [builder.mul(builder.add(m, I64(r)), self.inner) for r in range(rows)]
        with cgutils.for_range_slice(builder, I64(0), self.inner, I64(size), I64) as (k, _):
            read = [self._reader(builder.add(start, k)) for start in starts]
            for offset in range(0, size, SPAN):
                here = builder.add(k, I64(offset))
                pairs = [
                    [
                        vector.load(Float.FP32, self.x, builder.add(builder.add(start, here), add))
                        for add in (I64(0), I64(WIDTH))
                    ]
                    for start in inputs
                ]
                for c in range(columns):
                    values = read[c](builder.add(starts[c], here))
                    for r in range(rows):
                        total = builder.load(sums[c, r])
                        for weight, factor in zip(values, pairs[r], strict=True):
                            total = vector.fma(weight, factor, total)
                        builder.store(total, sums[c, r])
        for c, r in places:
            row = builder.mul(builder.add(m, I64(r)), self.columns)
            place = builder.add(row, builder.add(n, I64(c)))
            total = vector.sum_of(builder.load(sums[c, r]))
            builder.store(total, builder.gep(self.out, [place]))

    def _reader(self, first: Value) -> Any:
        """A function that emits two vectors of weights, from an element of the group at `first`."""
        builder, vector, quant = self.builder, self.vector, self.weights.quant_type
        number = builder.udiv(first, I64(self.weights.group_size))
        word = builder.load(builder.gep(self.at.words, [number]), align=4)

        def rounded(value: Value) -> Value:
            return vector.decode(self.kind, vector.encode(self.kind, value))

        if quant is QuantType.INT8:
            return lambda start: [
                rounded(signed_bytes(vector, word, self.at.codes, builder.add(start, I64(add))))
                for add in (0, WIDTH)
            ]
        table = builder.bitcast(rounded(levels(vector, quant, self.kind, word)), vector.of(I32))
        return lambda start: [
            builder.bitcast(vector.lookup(table, each), vector.of(F32))
            for each in vector.load_pairs(self.at.codes, start, quant)
        ]
