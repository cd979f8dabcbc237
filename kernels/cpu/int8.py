"""The 8-bit code of optimizer states: blocks of 256 values with one scale and a small float each.

Blocks of BLOCK elements are counted from the start of an array; the last one may be shorter. A
block has a scale s, a power of two in fp32, and a byte per element. With c the byte's low bits and
`bits` the fp32 bits of a number, a byte stands for

    SIGNED     (exp_avg, momentum_buffer)  1 sign, 7 bits c:   +-(float(bits(s) + (c << 20)) - s)
    UNSIGNED   (exp_avg_sq, sum)                  8 bits c:       float(bits(s) + (c << 20)) - s

which is a float of 3 mantissa bits and 4 or 5 exponent bits with its origin moved by s: c = 0 is
zero, steps are s / 8 near zero and an eighth (at most) of the value further out, with no special
case between. Both operations are exact.

Encoding a block takes the largest magnitude as an integer, since fp32 bits without their sign are
ordered like the numbers (a NaN above infinity):

    a = max(bits(x) & 0x7fffffff)                         over the block
    e = (a + 0x200000) >> 23                              its exponent, the next one from 1.75 on
    e = max(e - 15, 8)  SIGNED,  max(e - 31, 8)  UNSIGNED
    s = float(e << 23), or if a >= 0x7f800000 the NaN 0x7fc00000

and then, per element, with 16 random bits n (see `kernels.cpu.noise`), in fp32 and uint32:

    t = |x| + s                                           one fp32 addition, rounded to nearest even
    c = (bits(t) - bits(s) + (n << 4) + 8) >> 20
    UNSIGNED    c = max(c, 1) if x is not zero            x is never negative
    SIGNED      byte = c | sign bit of x << 7             also of a zero

c never leaves its 7 or 8 bits. Guarantees: the expected value of the decoded number is x to 2**-16
of a step, but for a second moment above zero that is less than s / 8, the first value of the code:
it reads as s / 8, so that no m / sqrt(v) explodes. That is about 2**-34 of the block's largest:
where gradients are 10**5 times smaller than the largest of their block, parameters move too
little. The error is less than one step, and steps are at most (|x| + s) / 8; zero stays zero; a
value that the code has for this scale is kept, for any noise. The scale of a block of zeros, or of
values so tiny, is 2**-119; a scale of 0.0 over bytes of 0 is read as zeros, too: a state may start
as zeroed memory. A block with an infinity or a NaN gets a NaN as its scale and bytes of 0, and
reads as NaN everywhere, now and after every later step. Values from 1.75 * 2**127 on may read as
infinity.

Linear codes, codes with other exponents and scales that follow the largest value exactly are worse:
benchmarks/records/kernels.md. Updates carry the rounding as a jitter of the learning rate per
element of about 10 %. (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022,
use a table of 256 values, a scale = absmax and rounding to nearest.)
"""

from llvmlite import ir

from offload.kernels.cpu.lanes import F32, I32, NAN_BITS, Lanes, Value
from offload.kernels.rules import BLOCK as BLOCK

MIN_SCALE_EXPONENT = 8  # biased: everything stays a normal number, a step (2**-122) included
_MANTISSA_BITS = 3
_SHIFT = 23 - _MANTISSA_BITS  # from a place in the code to the same place in fp32 bits


def octaves(signed: bool) -> int:
    """The number of exponents of the code above that of its scale."""
    return 15 if signed else 31


def decode_int8(vector: Lanes, base: Value, index: Value, scale_bits: Value, signed: bool) -> Value:
    """Emit fp32 lanes from bytes; `scale_bits` are those of the block's scale in every lane."""
    builder = vector.builder
    raw = vector.load_code(base, index)
    code = vector.code_bits(raw, 0x7F if signed else 0xFF, _SHIFT)
    scale = builder.bitcast(scale_bits, vector.of(F32))
    moved = builder.bitcast(builder.add(code, scale_bits), vector.of(F32))
    value = builder.fsub(moved, scale)
    if not signed:
        return value
    bits = builder.or_(builder.bitcast(value, vector.of(I32)), vector.code_bits(raw, 0x80, 24))
    return builder.bitcast(bits, vector.of(F32))


def encode_int8(
    vector: Lanes, value: Value, scale_bits: Value, noise: Value, signed: bool
) -> Value:
    """Emit codes in i32 lanes from fp32 lanes; `noise` are 16 random bits, moved left by 4.

    `scale_bits` is a scalar. Of a value without a sign, the sign bit is not looked at.
    """
    builder = vector.builder
    bits = builder.bitcast(value, vector.of(I32))
    magnitude = vector.magnitude_bits(value) if signed else bits
    scale = builder.bitcast(vector.splat(scale_bits), vector.of(F32))
    total = builder.fadd(builder.bitcast(magnitude, vector.of(F32)), scale)
    # 8: half of what the noise leaves out. In the scalar, where it costs nothing.
    origin = vector.splat(builder.sub(scale_bits, I32(8)))
    above = builder.sub(builder.bitcast(total, vector.of(I32)), origin)
    code = vector.shift_right(builder.add(above, noise), _SHIFT)
    if signed:
        sign = builder.and_(vector.shift_right(bits, 24), vector.constant(I32, 0x80))
        return builder.or_(code, sign)
    min_code = vector.unsigned_min(magnitude, vector.constant(I32, 1))
    return vector.unsigned_max(code, min_code)


def scale_bits_for(builder: ir.IRBuilder, largest: Value, signed: bool) -> tuple[Value, Value]:
    """Emit the bits of a block's scale from its largest magnitude bits, and whether it is finite.

    Both are scalars. For a block that is not finite, the bits are those of the NaN.
    """
    rounded = builder.lshr(builder.add(largest, I32(0x200000)), I32(23))
    lowered = builder.sub(rounded, I32(octaves(signed)))
    floor = I32(MIN_SCALE_EXPONENT)
    exponent = builder.select(builder.icmp_signed(">", lowered, floor), lowered, floor)
    finite = builder.icmp_unsigned("<", largest, I32(0x7F800000))
    bits = builder.select(finite, builder.shl(exponent, I32(23)), I32(NAN_BITS))
    return bits, finite
