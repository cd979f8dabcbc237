"""Numbers in words for people: `6.74 B`, `1.23 s`, `0.4 %`. Bytes: `tiers.units.format_bytes`."""

from __future__ import annotations

import math

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_MINUTE, _HOUR, _DAY, _YEAR = 60.0, 3600.0, 86400.0, 365.25 * 86400


def counted(number: float) -> str:
    """`6.74 B` (short scale: a thousand million), three digits; exact below ten thousand."""
    if number < 1e4:
        return f"{number:,.0f}"
    for factor, letter in _SCALES:
        if number >= factor * 0.9995:
            return f"{_digits(number / factor)} {letter}"
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """`12.3 ms`, `1.23 s`, `2 min 5 s`, `3 h 20 min`, `12.5 days`: at least two digits."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 2 * _MINUTE:
        return f"{_digits(seconds)} s"
    if seconds < 2 * _HOUR:
        return _two(seconds, _MINUTE, "min", 1.0, "s")
    if seconds < 2 * _DAY:
        return _two(seconds, _HOUR, "h", _MINUTE, "min")
    if seconds < 2 * _YEAR:
        return f"{_digits(seconds / _DAY)} days"
    return f"{_digits(seconds / _YEAR)} years"


def per_second(rate: float) -> str:
    """`12,300` or `0.0431`: three digits, no unit."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else _digits(rate)


def share(fraction: float) -> str:
    """`37 %`; what is there is never shown as 0 %, and only all of it as 100 %."""
    percent = fraction * 100
    if percent <= 0:
        return "0 %"
    if percent < 0.1:
        return "<0.1 %"
    if percent < 9.95:
        return f"{percent:.1f} %"
    if 99.5 <= percent < 100:
        return ">99 %"
    return f"{percent:.0f} %" if percent < 995 else f"x {_digits(fraction)}"


def factor_of_time(factor: float) -> str:
    """A step's time against another's: `+12 %`, `-18 %`, `x 3.4`."""
    percent = (factor - 1) * 100
    if factor >= 2:
        return f"x {_digits(factor)}"
    if abs(percent) < 0.5:
        return "±0 %"
    return f"{percent:+.0f} %"


def _digits(number: float) -> str:
    """Three significant digits, without an exponent."""
    if number >= 99.95:
        return f"{number:,.0f}"
    if number >= 9.995:
        return f"{number:.1f}"
    if number >= 0.9995:
        return f"{number:.2f}"
    return f"{float(f'{number:.3g}'):.10f}".rstrip("0").rstrip(".") or "0"


def _two(seconds: float, large: float, large_name: str, small: float, small_name: str) -> str:
    whole, rest = divmod(round(seconds / small), round(large / small))
    return f"{whole} {large_name} {rest} {small_name}" if rest else f"{whole} {large_name}"
