"""Short texts for durations, rates and bytes."""

from __future__ import annotations

from offload.tiers.units import format_bytes


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


def took(seconds: float) -> str:
    """A duration: `12 s`, `2 min 05 s`, `3 h 20 min`, `2 days 4 h`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02d} s"
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def per_step(seconds: float) -> str:
    """A step's time: `85.1 ms/step`, `1.24 s/step`."""
    small = seconds < 0.9995
    return f"{seconds * 1e3:.3g} ms/step" if small else f"{seconds:,.3g} s/step"


def per_second(nbytes: float) -> str:
    """A rate: `1.24 GB/s`, `610 MB/s`; decimal, as links and disks are sold."""
    small = nbytes < 0.9995e9
    return f"{nbytes / 1e6:.3g} MB/s" if small else f"{nbytes / 1e9:.3g} GB/s"


def of_budget(used: int, budget: int) -> str:
    """A share of a budget: `1.2 of 6.0 GiB`, `96.0 MiB of 6.0 GiB`."""
    held, most = format_bytes(used), format_bytes(budget)
    if held.split()[1] == most.split()[1]:
        held = held.split()[0]
    return f"{held} of {most}"


def _rounded(value: float, to: int) -> int:
    return max(to, round(value / to) * to)
