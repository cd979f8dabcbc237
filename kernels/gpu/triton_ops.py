# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, RET505 - what is fixed at compile time is written so in Triton
"""Element operations that Triton kernels share: formats, split masters, operations rounded once.

Everything here has the same bits as `kernels.cpu.lanes` has on the CPU, on a GPU and in Triton's
interpreter alike. That rules out what Triton offers first: a cast to bf16 (the interpreter drops
the low bits, a GPU rounds to nearest), `/` (approximate on a GPU) and `tl.sqrt` (likewise). It also
means that kernels are launched with enable_fp_fusion=False, see `kernels.gpu.triton_launch`:
otherwise the compiler is free to fuse the products and sums written here.

16-bit floats come and go as int16 bits, as in the rest of `kernels`. Importing this module imports
Triton, which reads TRITON_INTERPRET at that moment; the launchers import it at their first call.
"""

import triton
import triton.language as tl

from offload.kernels.floats import Float

FP32 = tl.constexpr(int(Float.FP32))
BF16 = tl.constexpr(int(Float.BF16))
FP16 = tl.constexpr(int(Float.FP16))


@triton.jit
def bits_of(value):
    """fp32 -> its bits, uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def bits_or_nan(value):
    """fp32 -> its bits, a NaN made canonical: rounding up another one can carry into the sign."""
    return tl.where(value != value, 0x7FC00000, bits_of(value))


@triton.jit
def from_bits(bits):
    """uint32 -> the fp32 it is the bits of."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def high_half(bits):
    """The upper 16 of uint32, as int16."""
    return (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def low_half(bits):
    """The lower 16 of uint32, as int16."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def widen_bits(raw):
    """int16 -> uint32, no sign."""
    return raw.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def decode(raw, FLOAT: tl.constexpr):
    """An element of an array in this format -> fp32 (exact)."""
    if FLOAT == BF16:
        return from_bits(widen_bits(raw) << 16)
    elif FLOAT == FP16:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return raw


@triton.jit
def encode(value, FLOAT: tl.constexpr):
    """fp32 -> what an array of this format holds, rounded to nearest even."""
    if FLOAT == BF16:
        bits = bits_or_nan(value)
        return high_half(bits + 0x7FFF + ((bits >> 16) & 1))
    elif FLOAT == FP16:
        return value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return value


@triton.jit
def join(high, low):
    """The fp32 master of two int16 halves: (high << 16) + low, low being signed."""
    return from_bits((widen_bits(high) << 16) + low.to(tl.int32).to(tl.uint32, bitcast=True))


@triton.jit
def split_high(value):
    """The bf16 half of a split master: rounds half up."""
    return high_half(bits_or_nan(value) + 0x8000)


@triton.jit
def split_low(value):
    """The remainder of `split_high`, an int16."""
    return low_half(bits_or_nan(value))


@triton.jit
def load(pointer, offsets, numel, WHOLE: tl.constexpr):
    """Elements at offsets, 0 beyond numel; WHOLE promises that none is beyond.

    Without a mask the loads are vectors whatever numel is; a mask that depends on an unknown numel
    would make every access of the array a scalar one.
    """
    if WHOLE:
        return tl.load(pointer + offsets)
    else:
        return tl.load(pointer + offsets, mask=offsets < numel, other=0)


@triton.jit
def store(pointer, offsets, value, numel, WHOLE: tl.constexpr):
    """Store elements at offsets; the reverse of `load`."""
    if WHOLE:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=offsets < numel)
