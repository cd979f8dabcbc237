"""Short texts for durations, rates and bytes, and cells that fill lines of any width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offload.tiers.units import format_bytes

BOLD, DIM, RED, YELLOW, GREEN, CYAN = "1", "2", "31", "33", "32", "36"
_GAP = "   "


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a line that is not broken. `style`: a number of ECMA-48, or several with `;`."""

    text: str
    style: str = ""

    def shown(self, *, coloured: bool) -> str:
        return f"\x1b[{self.style}m{self.text}\x1b[m" if self.style and coloured else self.text


def lines_of(
    label: str, cells: Iterable[Cell], columns: int, *, coloured: bool, indent: int = 10
) -> Iterator[str]:
    """Lay out `label` and `cells` beside it on as many lines as they need; wider ones are cut."""
    start = Cell(label.ljust(indent), DIM).shown(coloured=coloured)
    line, used = start, indent
    for cell in cells:
        gap = _GAP if used > indent else ""
        if gap and used + len(gap) + len(cell.text) > columns:
            yield line
            line, used, gap = " " * indent, indent, ""
        cut = Cell(cell.text[: max(0, columns - used - len(gap))], cell.style)
        line += gap + cut.shown(coloured=coloured)
        used += len(gap) + len(cut.text)
    yield line


def filled(share: float, width: int) -> str:
    """A bar of `width` characters, of which `share` (0..1) is filled; all of it above 1."""
    full = min(width, round(share * width))
    return "█" * full + "░" * (width - full)


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
