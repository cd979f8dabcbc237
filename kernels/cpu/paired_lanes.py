"""Vectors of 16 elements for AVX2 kernels whose arrays are mostly 16-bit or 8-bit.

A vector of 16 fp32 values is two AVX2 registers. Filling them in the order of memory takes two
widening loads and two shifts, and emptying them two shifts, a pack and a permutation across the
register's halves: all of that on the two ports that do shuffles, shifts, divisions and roots, which
the kernels keep busy anyway. Here the first register has the even elements, the second the odd
ones. As 32-bit words the array then holds a pair per word: a shift gives one register, a mask the
other, and masks run on any port.

    memory     | 1 0 | 3 2 | 5 4 | ...     32-bit words of two bf16 each
    x << 16    | 0 . | 2 . | 4 . | ...     fp32 bits of the even elements
    x & ~ffff  | 1 . | 3 . | 5 . | ...     of the odd ones

With 512-bit registers a vector is one register and the order of memory is the better one. Results
have the same bits either way: lanes never mix.
"""

from collections.abc import Sequence

from llvmlite import ir

from offload.kernels.cpu.lanes import F32, I8, I16, I32, WIDTH, Lanes, Value
from offload.kernels.floats import Float

_HALF = WIDTH // 2
_HIGH = 0xFFFF0000
# Element of each lane, and lane of each element.
_NUMBERS = [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]
_PLACES = [_NUMBERS.index(number) for number in range(WIDTH)]


class PairedLanes(Lanes):
    """`Lanes` of WIDTH elements, even ones first. Arrays are in order, only lanes are not."""

    @property
    def numbers(self) -> Sequence[int]:
        return _NUMBERS

    def load(self, kind: Float, base: Value, index: Value) -> Value:
        if kind is not Float.BF16:
            return self._ordered(super().load(kind, base, index), _NUMBERS)
        even, odd = self._load_pairs(base, index)
        return self.builder.bitcast(self._concat(even, odd), self.of(F32))

    def store(self, kind: Float, value: Value, base: Value, index: Value) -> None:
        super().store(kind, self._ordered(value, _PLACES), base, index)

    def store_bf16(self, bits: Value, base: Value, index: Value) -> None:
        even, odd = self._halves(bits)
        words = self.builder.or_(
            self._half.shift_right(even, 16), self.builder.and_(odd, self._mask(_HIGH))
        )
        self.store_raw(self.builder.bitcast(words, self.of(I16)), base, index)

    def load_split(self, high: Value, low: Value, index: Value) -> Value:
        builder = self.builder
        lower = self.load_raw(I16, low, index)
        # (high << 16) + low is (high - 1 if low < 0) << 16 | bits of low
        borrow = builder.ashr(lower, self.constant(I16, 15))
        upper = builder.add(self.load_raw(I16, high, index), borrow)
        words, tails = (builder.bitcast(x, self._half.of(I32)) for x in (upper, lower))
        even = builder.or_(
            self._half.shift_left(words, 16), builder.and_(tails, self._mask(0xFFFF))
        )
        odd = builder.or_(builder.and_(words, self._mask(_HIGH)), self._half.shift_right(tails, 16))
        return builder.bitcast(self._concat(even, odd), self.of(F32))

    def store_split(self, value: Value, high: Value, low: Value, index: Value) -> None:
        builder = self.builder
        even, odd = self._halves(self.bits_or_nan(value))
        words = builder.or_(self._half.shift_right(even, 16), builder.and_(odd, self._mask(_HIGH)))
        tails = builder.or_(builder.and_(even, self._mask(0xFFFF)), self._half.shift_left(odd, 16))
        upper, lower = (builder.bitcast(x, self.of(I16)) for x in (words, tails))
        # (bits + 0x8000) >> 16 is one more than the upper half where the lower one is negative
        carry = builder.lshr(lower, self.constant(I16, 15))
        self.store_raw(builder.add(upper, carry), high, index)
        self.store_raw(lower, low, index)

    def load_code(self, base: Value, index: Value) -> Value:
        wide = self.builder.zext(self.load_raw(I8, base, index), self.of(I16))
        return self.builder.bitcast(wide, self._half.of(I32))

    def code_bits(self, code: Value, mask: int, shift: int) -> Value:
        even = self._half.code_bits(code, mask, shift)
        odd = self.builder.and_(self._half.shift_left(code, shift - 16), self._mask(mask << shift))
        return self._concat(even, odd)

    def store_code(self, code: Value, keep: Value, base: Value, index: Value) -> None:
        even, odd = self._halves(code)
        words = self.builder.or_(even, self._half.shift_left(odd, 16))
        super().store_code(self.builder.bitcast(words, self.of(I16)), keep, base, index)

    @property
    def _half(self) -> Lanes:
        return Lanes(self.builder, _HALF)

    def _mask(self, mask: int) -> Value:
        return self._half.constant(I32, mask)

    def _load_pairs(self, base: Value, index: Value) -> tuple[Value, Value]:
        words = self.builder.bitcast(self.load_raw(I16, base, index), self._half.of(I32))
        return self._half.shift_left(words, 16), self.builder.and_(words, self._mask(_HIGH))

    def _concat(self, even: Value, odd: Value) -> Value:
        return self._shuffled(even, odd, range(WIDTH))

    def _halves(self, value: Value) -> tuple[Value, Value]:
        return (
            self._shuffled(value, value, range(_HALF)),
            self._shuffled(value, value, range(_HALF, WIDTH)),
        )

    def _ordered(self, value: Value, places: Sequence[int]) -> Value:
        return self._shuffled(value, value, places)

    def _shuffled(self, a: Value, b: Value, places: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
        return self.builder.shuffle_vector(a, b, mask)
