"""Numbers of every kind for the conversions between formats."""

import numpy as np
from numpy.typing import NDArray

from offload.kernels.floats import Float

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
