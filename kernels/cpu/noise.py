"""Random bits for stochastic rounding, made from the number of an element and a key.

A rounding is stochastic when a value between two neighbours of a format becomes the upper one with
a probability that is its distance from the lower one: the expected result is the value itself, so
that a moment which changes by less than half a step of its format still moves, on average, as it
should (Gupta et al., "Deep learning with limited numerical precision", 2015). The bits come from a
counter instead of a generator with a state (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", 2011), so they are the same on every device and do not depend on placement, chunks, threads
or the order of the work. For element number i, all in uint32 that wraps,

    r(key) = mix32((i * 0x9E3779B9) ^ key)

    mix32(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16

(`mix32` is Wellons' lowbias32, a bijection; the multiplication by 2**32 / golden ratio spreads
neighbours.) i counts from the start of a group's flat buffer, whatever part of it an array holds:
`Noise.first` is the number of the array's first element. 16 bits are used per rounding:

    state 0 of a rule            r(key) >> 16
    state 1 of a rule            r(key) & 0xffff
    a weight without a master    r(weight_key) >> 16

The keys are the halves of a 64-bit hash of (seed, group, step), made once per group and step:

    h = 0;  for word in (seed, group, step):  h = mix64((h ^ word) + 0x9E3779B97F4A7C15)
    key = h >> 32;  weight_key = h & 0xffffffff

    mix64(x):  x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9;  x ^= x >> 27;  x *= 0x94d049bb133111eb
               x ^= x >> 31                        (the finalizer of SplitMix64, in uint64)

Rounding fp32 bits u to bf16 with 16 random bits n is (u + n) >> 16, with every NaN made 0x7fc00000
first. NaN stays NaN and an infinity stays itself; a finite value beyond the largest bf16 becomes
that or infinity. A value that bf16 can hold is kept for any n.
"""

from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir

from offload.kernels.cpu.lanes import I32, Lanes, Value

GOLDEN = 0x9E3779B9
_GOLDEN64 = 0x9E3779B97F4A7C15
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Noise:
    """The source of an array's random bits. All three are uint32s; `first` wraps."""

    key: int  # for states
    weight_key: int  # for a weight without a master
    first: int = 0  # number, in the group's flat buffer, of the array's first element

    def at(self, first: int) -> "Noise":
        """The same noise for an array that starts at element number `first`."""
        return Noise(self.key, self.weight_key, first)


@lru_cache(maxsize=256)  # several parts of a group ask for it one after the other
def noise_of(seed: int, group: int, step: int) -> Noise:
    """The noise of one step of one group, for an array that starts where the group does."""
    state = 0
    for word in (seed, group, step):
        state = mix64((state ^ (word & _MASK64)) + _GOLDEN64)
    return Noise(state >> 32, state & _MASK32)


def mix64(value: int) -> int:
    """SplitMix64's finalizer."""
    value &= _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value ^ value >> 31


def random_bits(vector: Lanes, number: Value, key: Value, shift: int = 0) -> tuple[Value, Value]:
    """Emit r(key) >> 16 and r(key) & 0xffff, each moved left by `shift`, for neighbouring elements;
    `number` (i32) is that of the first."""
    builder = vector.builder
    start = builder.mul(number, ir.Constant(I32, GOLDEN - 2**32))
    spread = vector.constants(I32, [lane * GOLDEN & _MASK32 for lane in range(vector.width)])
    x = builder.xor(builder.add(vector.splat(start), spread), vector.splat(key))
    x = builder.xor(x, vector.shift_right(x, 16))
    x = builder.mul(x, vector.constant(I32, 0x7FEB352D))
    x = builder.xor(x, vector.shift_right(x, 15))
    x = builder.mul(x, vector.constant(I32, 0x846CA68B))
    mask = vector.constant(I32, 0xFFFF << shift)
    high = vector.shift_right(x, 16 - shift)  # the last line of mix32 changes the low half only
    low = builder.xor(vector.shift_left(x, shift), high)
    return builder.and_(high, mask), builder.and_(low, mask)
