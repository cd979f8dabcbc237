"""Kinds of values, and the comparison of arrays by their bits."""

import numpy as np

from offload.kernels.floats import Array

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
