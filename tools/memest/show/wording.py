"""Numbers in words for people: `6.74 B`, `1.23 s`, `0.4 %`. Bytes: `tiers.units.format_bytes`."""

from __future__ import annotations

from offload.planning.choice.durations import counted, duration, three_digits

__all__ = ["counted", "duration", "factor_of_time", "per_second", "share"]


def per_second(rate: float) -> str:
    """`12,300` or `0.0431`: three digits, no unit."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else three_digits(rate)


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
    return f"{percent:.0f} %" if percent < 995 else f"x {three_digits(fraction)}"


def factor_of_time(factor: float) -> str:
    """A step's time against another's: `+12 %`, `-18 %`, `x 3.4`."""
    percent = (factor - 1) * 100
    if factor >= 2:
        return f"x {three_digits(factor)}"
    if abs(percent) < 0.5:
        return "±0 %"
    return f"{percent:+.0f} %"
