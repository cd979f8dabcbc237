"""Kinds of values, and the comparison of arrays by their bits."""

import numpy as np
from numpy.typing import NDArray

from offload.kernels.floats import Array, Float

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, 1.1754944e-38, 3.4028235e38, -3.4e38,
     3.3961775e38, 1e-20, 1e20, 1.0, -1.0],
    dtype=np.float32,
)  # fmt: skip


def assert_same(got: Array, expected: Array, what: str = "") -> None:
    """Equal bits; a NaN equals any other."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bits = f"u{got.itemsize}"
    differs = got.view(bits) != expected.view(bits)
    if got.dtype.kind == "f":
        differs &= ~(np.isnan(got) & np.isnan(expected))
    where = np.flatnonzero(differs)[:5]
    assert not where.size, f"{what} differs at {where}: {got[where]} for {expected[where]}"


SIXTEEN = [Float.BF16, Float.FP16]
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
EDGES = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000,
     0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF,
     0xFFFF8000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001],
    dtype=np.uint32,
)  # fmt: skip


def patterns(numel: int) -> NDArray[np.float32]:
    """fp32 of every kind: random bits, with the edge cases among them."""
    bits = np.random.default_rng(numel).integers(0, 1 << 32, numel, dtype=np.uint32)
    bits[: EDGES.size] = EDGES[:numel]
    return bits.view(np.float32)
