"""Durations, counts, rates and bytes as text, in one form everywhere: `12.3 ms`, `6.74 B`."""

import math
from collections.abc import Sequence

from offload.tiers.units import format_bytes

_MINUTE, _HOUR, _DAY, _YEAR = 60.0, 3600.0, 86400.0, 365.25 * 86400
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def duration(seconds: float) -> str:
    """Format `12.3 ms`, `1.23 s`, `2 min 5 s`, `3 h 20 min`, `12.5 days`: at least two digits."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{three_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{three_digits(seconds * 1e3)} ms"
    if seconds < 2 * _MINUTE:
        return f"{three_digits(seconds)} s"
    if seconds < 2 * _HOUR:
        return _two(seconds, _MINUTE, "min", 1.0, "s")
    if seconds < 2 * _DAY:
        return _two(seconds, _HOUR, "h", _MINUTE, "min")
    if seconds < 2 * _YEAR:
        return f"{three_digits(seconds / _DAY)} days"
    return f"{three_digits(seconds / _YEAR)} years"


def counted(number: float) -> str:
    """Format `6.74 B` (short scale: 10^9) with three digits; exact below ten thousand."""
    if number < 1e4:
        return f"{number:,.0f}"
    for factor, letter in _SCALES:
        if number >= factor * 0.9995:
            return f"{three_digits(number / factor)} {letter}"
    raise AssertionError("unreachable")


def three_digits(number: float) -> str:
    """Format a number with three significant digits, without an exponent."""
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


def share(fraction: float) -> str:
    """Return `37 %`; only nothing is shown as 0 %, and only everything as 100 %."""
    percent = fraction * 100
    if percent <= 0:
        return "0 %"
    if percent < 0.1:
        return "<0.1 %"
    if percent < 9.95:
        return f"{percent:.1f} %"
    if 99.5 <= percent < 100:
        return ">99 %"
    return f"{percent:.0f} %" if percent < 995 else f"x {three_digits(fraction)}"


def about(seconds: float) -> str:
    """The remaining time, `about 3 min left`, with the precision of an estimate."""
    if seconds < 10:
        return "some seconds left"
    if seconds < 100:
        return f"about {_rounded(seconds, 10)} s left"
    if seconds < 100 * 60:
        return f"about {round(seconds / 60)} min left"
    if seconds < 48 * 3600:
        return f"about {round(seconds / 3600)} h left"
    return f"about {round(seconds / 86400)} days left"


def per_second(nbytes: float) -> str:
    """A rate: `1.24 GB/s`, `610 MB/s`; decimal, as links and disks are sold."""
    small = nbytes < 0.9995e9
    return f"{nbytes / 1e6:.3g} MB/s" if small else f"{nbytes / 1e9:.3g} GB/s"


def of_budget(used: int, budget: int) -> str:
    """A share of a budget: `1.2 of 6.0 GiB`, `96.0 MiB of 6.0 GiB`."""
    held, limit = format_bytes(used), format_bytes(budget)
    if held.split()[1] == limit.split()[1]:
        held = held.split()[0]
    return f"{held} of {limit}"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list: `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _rounded(value: float, to: int) -> int:
    return max(to, round(value / to) * to)
