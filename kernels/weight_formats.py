"""Formats of weights that are stored in 8 or 4 bits: what is stored, and how many bytes it takes.

`cpu/quantization.py` has the arithmetic. A tensor is cut into groups of `group_size` consecutive
elements, each with a scale; scales come first, so that a tensor can be dequantized while the end
of its codes is still being read:

    ├─ one 32-bit word per group ─┤ to a multiple of 64 bytes ├─ codes ─┤ to a multiple of 64 bytes
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

GROUP_SIZES = (32, 64, 128, 256)
LINE_NBYTES = 64  # both parts begin on a cache line
_SCALE_NBYTES = 4


def _fp32(value: float) -> float:
    nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    return nearest


NF4_LEVELS = tuple(
    _fp32(level)
    for level in (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )
)  # fmt: skip
NF4_MIDPOINTS = tuple(_fp32((low + high) / 2) for low, high in pairwise(NF4_LEVELS))
MIN_SCALE_BITS = 27 << 23  # 2**-100
GRID_STEP_BITS = 1 << 17  # fp32 bits of INT4's scales are multiples of it: 7 significant bits
SIXTEEN_FIFTEENTHS = _fp32(16 / 15)
INT8_SCALE_MASK = 0xFFFFFF80  # 17 significant bits: 127 times the scale is exact
# The largest finite numbers by Float.
LARGEST = (3.4028234663852886e38, 3.3895313892515355e38, 65504.0)


class QuantType(IntEnum):
    """How elements are quantized; the name in lower case is the one in a configuration."""

    INT8 = 0
    INT4 = 1
    NF4 = 2

    @property
    def bits(self) -> int:
        """The number of bits per element, without its share of a scale."""
        return 8 if self is QuantType.INT8 else 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The stored format of a tensor's elements."""

    quant_type: QuantType
    group_size: int = 64  # elements that share a scale

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"group_size: expected one of {sizes}, got {self.group_size}")

    @property
    def name(self) -> str:
        """The name of the format in a configuration."""
        return self.quant_type.name.lower()

    def scales_nbytes(self, numel: int) -> int:
        """Bytes before the codes of `numel` elements, whole groups."""
        return _lines(numel // self.group_size * _SCALE_NBYTES)

    def codes_nbytes(self, numel: int) -> int:
        return numel * self.quant_type.bits // 8

    def stored_nbytes(self, numel: int) -> int:
        """Bytes of a tensor of `numel` elements; ValueError where those are no whole groups."""
        if numel % self.group_size:
            raise ValueError(f"{numel} elements are no whole groups of {self.group_size}")
        return self.scales_nbytes(numel) + _lines(self.codes_nbytes(numel))

    def refusal(self, shape: Sequence[int]) -> str | None:
        """Return why a tensor of this shape cannot be stored so, as a clause; None if it can.

        A group of INT8 and INT4 lies in one row (of `in_features` elements), one of NF4 anywhere.
        """
        if len(shape) < 2:
            return f"it has {len(shape)} dimensions, and only matrices are stored in fewer bits"
        numel, size = math.prod(shape), self.group_size
        if self.quant_type is not QuantType.NF4 and shape[-1] % size:
            return f"its rows of {shape[-1]} elements are no whole groups of {size}"
        return f"its {numel} elements are no whole groups of {size}" if numel % size else None


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES
