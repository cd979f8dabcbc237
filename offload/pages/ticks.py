"""Round numbers along an axis of time or of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

_UNITS = ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"),
          (1e-3, "ms"), (1e-6, "µs"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the axis."""

    text: str
    at: float


def ticks(length_s: float, wanted: int = 5) -> tuple[Tick, ...]:
    """About `wanted` round times from 0 on, in one unit."""
    unit, name = next(each for each in _UNITS if length_s >= each[0] * 2 or each is _UNITS[-1])
    width = _rounded(length_s / unit / wanted, by_sixty=name in ("min", "s") and length_s > 2)
    count = int(length_s / unit / width * 1.000001)
    return tuple(
        Tick(f"{i * width:,.10g} {name}" if i else "0", min(1.0, i * width * unit / length_s))
        for i in range(count + 1)
    )


def byte_ticks(length_nbytes: int, wanted: int = 5) -> tuple[Tick, ...]:
    """About `wanted` round sizes from 0 on, in one binary unit."""
    power = max(0, min(4, (length_nbytes.bit_length() - 1) // 10))
    unit, name = 1 << 10 * power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    width = max(_rounded(length_nbytes / unit / wanted, by_sixty=False), 0.0 if power else 1.0)
    count = int(length_nbytes / unit / width * 1.000001)
    return tuple(
        Tick(f"{i * width:,.10g} {name}" if i else "0", min(1.0, i * width * unit / length_nbytes))
        for i in range(count + 1)
    )


def _rounded(value: float, *, by_sixty: bool) -> float:
    """Round to 1, 2, 5, 10, 20 ...; minutes and seconds (`by_sixty`) also to 15 and 30."""
    if by_sixty and 10 < value <= 30:
        return 15.0 if value <= 15 else 30.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * 0.75)
