"""Packing floating-point arrays without loss: exponents in as few bits as their block needs.

    low     the low 16 bits of fp32 values, as they are; bf16 has none
    high    of the upper 16 bits: sign and mantissa, a byte per value
    heads   per block of 256: r, the largest exponent; width | fold << 4 | zeros << 5
    codes   r - e in `width` bits (2, 4, 8) per value, all ones for e = 0 (zeros and denormals)

Where nothing is negative (second moments), `fold`: the codes' lowest bits are in the signs' place.
Any bits come back. Offsets from a reference: Goldstein, Ramakrishnan, Shaft, "Compressing relations
and indexes" (1998). Exponents of weights carry 2.6 bits: ZipNN (2024), DFloat11 (2025), which use
entropy coders: a few per cent smaller, many times slower on a CPU.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
from numba import uint8, uint16, uint32

from offload.kernels import jit
from offload.kernels.floats import Array, Runner, serial

BLOCK, STRIP = 256, 1 << 16  # values; the codes of each strip begin at a place of their own


def _pack(e, high, codes, head):  # type: ignore[no-untyped-def]
    r, least, above_zero, signs = uint8(0), uint8(255), uint8(255), uint8(0)
    for i in range(BLOCK):
        r, least, signs = max(r, e[i]), min(least, e[i]), signs | high[i]
        above_zero = min(above_zero, uint8(e[i] - uint8(1)))  # 0 becomes the largest
    most = 0 if r == 0 else int(r) - int(above_zero) - 1 + (least == 0)
    fold = uint8(signs < 128)
    width = 2 if most >> fold < 4 else 4 if most >> fold < 16 else 8
    head[0], head[1] = r, width | fold << 4 | (least == 0) << 5
    ones = uint8(min((1 << (width + fold)) - 1, 255))
    for i in range(BLOCK):
        e[i] = ones if e[i] == 0 else uint8(r - e[i])
    if fold:
        for i in range(BLOCK):
            high[i] |= uint8(e[i] << uint8(7))
            e[i] >>= uint8(1)
    part = codes[: BLOCK // 8 * width]
    part[:] = 0
    for j in range(8 // width):
        some = e[j * part.size :]
        for i in range(part.size):
            part[i] |= uint8(some[i] << uint8(j * width))
    return part.size


def _unpack(e, high, codes, head):  # type: ignore[no-untyped-def]
    r, width, fold = head[0], head[1] & 15, head[1] >> 4 & 1
    ones = uint8(min((1 << (width + fold)) - 1, 255))
    part, mask = codes[: BLOCK // 8 * width], uint8((1 << width) - 1)
    for j in range(8 // width):
        some = e[j * part.size :]
        for i in range(part.size):
            some[i] = (part[i] >> uint8(j * width)) & mask
    if fold:
        for i in range(BLOCK):
            e[i] = uint8(e[i] << uint8(1)) | (high[i] >> uint8(7))
    end = uint8(0) if head[1] >> 5 else uint8(r - ones)
    for i in range(BLOCK):
        e[i] = end if e[i] == ones else uint8(r - e[i])
    return part.size


@cache
def _encoder(wide: bool) -> jit.Kernel:
    pack, shift = jit.compiled(_pack), np.uint32(16 * wide)

    def encode(values, low, high, heads, codes, used, lo, hi):  # type: ignore[no-untyped-def]
        e = np.empty(BLOCK, np.uint8)
        for strip in range(lo, hi):
            place = strip * STRIP
            for start in range(strip * STRIP, (strip + 1) * STRIP, BLOCK):
                v, h = values[start : start + BLOCK], high[start : start + BLOCK]
                if wide:
                    w = low[start : start + BLOCK]
                    for i in range(BLOCK):
                        w[i] = uint16(v[i])
                for i in range(BLOCK):
                    top = uint16(v[i] >> shift)
                    e[i] = uint8(top >> uint16(7))
                    h[i] = uint8(top & uint16(0x7F)) | uint8((top >> uint16(8)) & uint16(0x80))
                place += pack(e, h, codes[place : place + BLOCK], heads[start // BLOCK * 2 :])
            used[strip] = place - strip * STRIP

    return jit.compiled(encode)


@cache
def _decoder(wide: bool) -> jit.Kernel:
    unpack, shift = jit.compiled(_unpack), np.uint32(16 * wide)

    def decode(values, low, high, heads, codes, used, lo, hi):  # type: ignore[no-untyped-def]
        e, h = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
        for strip in range(lo, hi):
            place = strip * STRIP
            for start in range(strip * STRIP, (strip + 1) * STRIP, BLOCK):
                v, stored = values[start : start + BLOCK], high[start : start + BLOCK]
                for i in range(BLOCK):  # a copy: nothing that is written below can be the same
                    h[i] = stored[i]
                head = heads[start // BLOCK * 2 :]
                place += unpack(e, h, codes[place : place + BLOCK], head)
                sign_bit = uint8(0) if head[1] >> 4 & 1 else uint8(0x80)
                for i in range(BLOCK):
                    sign = uint16(h[i] & sign_bit) << uint16(8)
                    top = sign | uint16(e[i]) << uint16(7) | uint16(h[i] & uint8(0x7F))
                    v[i] = uint32(top) << shift
                if wide:
                    w = low[start : start + BLOCK]
                    for i in range(BLOCK):
                        v[i] |= uint32(w[i])

    return jit.compiled(decode)


class Packed:
    """Room for `numel` values (whole strips) of 4 or 2 bytes, given as unsigned integers."""

    def __init__(self, numel: int, itemsize: int) -> None:
        self._wide = itemsize == 4
        self._low = np.zeros(numel * self._wide, np.uint16)
        self._high, self._codes = np.zeros(numel, np.uint8), np.zeros(numel, np.uint8)
        self._heads = np.zeros(numel // BLOCK * 2, np.uint8)
        self._used = np.zeros(numel // STRIP, np.int64)

    @property
    def nbytes(self) -> int:
        fixed = self._low.nbytes + self._high.nbytes + self._heads.nbytes
        return fixed + int(self._used.sum())

    def encode(self, values: Array, run: Runner = serial) -> None:
        self._run(_encoder(self._wide), values, run)

    def decode(self, values: Array, run: Runner = serial) -> None:
        """Fill `values`."""
        self._run(_decoder(self._wide), values, run)

    def _run(self, kernel: jit.Kernel, values: Array, run: Runner) -> None:
        arrays = (values, self._low, self._high, self._heads, self._codes, self._used)
        run(partial(kernel, *arrays), len(self._used))
