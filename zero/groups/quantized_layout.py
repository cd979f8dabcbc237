"""The layout of a quantized group's parameters at home.

    in a slot   ├─── q_proj ───┤├─ norm ─┤├────── up_proj ──────┤   `zero.groups.layout`
    stored      ├ int4 ─┤├─ norm ─┤├─── int4 ────┤                  `kernels.weight_formats`, or raw

Parts follow each other in the same order, each on a cache line, so that a part can be dequantized
once the stored bytes up to its end are there. Padding of the slot is not stored; it reads as zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.kernels.weight_formats import LINE_NBYTES, QuantType, WeightFormat
from offload.tiers.units import round_up
from offload.zero.groups.layout import Layout, ParamSpec


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """One parameter. Ranges are bytes of the two buffers."""

    spec: ParamSpec
    values: slice
    stored: slice
    weights: WeightFormat | None  # None: stored as it is


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """The stored buffer of a group, 1D."""

    parts: tuple[QuantizedPart, ...]
    nbytes: int  # of the group's buffer in a slot
    stored_nbytes: int


def refusal(shape: Sequence[int], weights: WeightFormat) -> str | None:
    """Return why a parameter of this shape cannot be stored so, as a clause; None if it can.

    A group of INT8 and INT4 lies in one row (of `in_features` elements), one of NF4 anywhere.
    """
    if len(shape) < 2:
        return f"it has {len(shape)} dimensions, and only matrices are stored in fewer bits"
    numel, size = math.prod(shape), weights.group_size
    if weights.quant_type is not QuantType.NF4 and shape[-1] % size:
        return f"its rows of {shape[-1]} elements are no whole groups of {size}"
    return f"its {numel} elements are no whole groups of {size}" if numel % size else None


def lay_out_quantized(layout: Layout, itemsize: int) -> QuantizedLayout:
    """Return the stored buffer of one rank's group, whose elements have `itemsize` bytes in a slot.
    Each parameter can be stored as its spec says (see `refusal`)."""
    parts, end = [], 0
    for spec in layout.params:
        weights, nbytes = spec.stored, spec.numel * itemsize
        stored = nbytes if weights is None else weights.stored_nbytes(spec.numel)
        begin = spec.offset * itemsize
        values, there = slice(begin, begin + nbytes), slice(end, end + stored)
        parts.append(QuantizedPart(spec, values, there, weights))
        end = round_up(there.stop, LINE_NBYTES)
    # no state is empty
    return QuantizedLayout(tuple(parts), layout.numel * itemsize, max(end, LINE_NBYTES))
