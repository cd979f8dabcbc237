"""Inline SVG without a view box: positions are percentages of the width and heights are pixels, so
that text keeps its size at any width."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from offload.pages.ticks import Tick

LEAST_PX = 330  # width of a drawing on a page of 420 px, or beside names and numbers on one of 800
_LETTER_PX = 7.2  # a wide letter of 12 px text, and its share of the margins
_GAP = 0.0012  # between neighbours, as a fraction


def drawing(kind: str, label: str, parts: Iterable[str]) -> str:
    """Return the element of class `kind`, which sets its height; `label` is for screen readers."""
    inside = "".join(parts)
    return f'<svg class="{kind}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def percent(fraction: float) -> str:
    """Format a position as a percentage."""
    return f"{fraction * 100:.4g}%"


def colour_class(meaning: str) -> str:
    """The CSS class that fills with the colour of a meaning."""
    return f"c-{meaning.replace(' ', '-')}"


def stretch(
    start: float, stop: float, height: int, meaning: str, label: str, tip: str,
    room: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """Return a coloured stretch of a bar or lane, with `label` if it certainly fits at `LEAST_PX`
    (into `room`, if not all of it is free) and `tip` for the pointer. It lies in an inner <svg>,
    which clips it."""
    width = max(stop - start - _GAP, 0.0015)
    inside = f'<rect width="100%" height="100%" rx="2" class="{colour_class(meaning)}"/>'
    left, right = room or (start, start + width)
    if (right - left) * LEAST_PX >= len(label) * _LETTER_PX + 8:
        middle = percent(((left + right) / 2 - start) / width)
        inside += (
            f'<text x="{middle}" y="{height / 2 + 4:g}" text-anchor="middle" '
            f'class="on {colour_class(meaning)}">{escape(label)}</text>'
        )
    return (
        f'<svg x="{percent(start)}" width="{percent(width)}" height="{height}">'
        f"{inside}<title>{escape(tip)}</title></svg>"
    )


def mark(tick: Tick) -> str:
    """Return a mark of the axis below bars or lanes."""
    anchor = "start" if tick.at < 0.03 else "end" if tick.at > 0.97 else "middle"
    at = percent(tick.at)
    return (
        f'<rect x="{at}" y="0" width="1" height="4" fill="var(--quiet)"/>'
        f'<text x="{at}" y="18" text-anchor="{anchor}" fill="var(--quiet)">{tick.text}</text>'
    )
