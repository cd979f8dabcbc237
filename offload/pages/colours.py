"""Colours of the pictures, on light and on dark.

Six hues for what is held and two greys for what is lost, in the order in which they are stacked;
neighbours also differ in lightness, for eyes and printers that see no hues. Never the only carrier
of a meaning: every picture has its numbers beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

SPANS = (0, 4, 3, 2, 5, 1)  # the hues, in the order in which a timeline uses them


@dataclass(frozen=True, slots=True)
class Theme:
    """One set of colours, as #rrggbb."""

    page: str
    card: str
    ink: str
    quiet: str  # less important text
    line: str
    track: str  # of a gauge, behind what is filled
    good: str
    bad: str
    colours: tuple[str, ...]  # by MemoryClass


LIGHT = Theme(
    page="#f6f6f4", card="#ffffff", ink="#1b1b1a", quiet="#5f5e5a", line="#deddd8",
    track="#e9e8e4", good="#0b7a3e", bad="#c2281d",
    colours=("#2a6fc9", "#86b6ee", "#e5a00d", "#0d7f5f", "#7b5cc9", "#d9577b", "#c9c7c0",
             "#85837c"),
)  # fmt: skip
DARK = Theme(
    page="#161615", card="#20201f", ink="#f1f0ec", quiet="#aeaca4", line="#3b3a37",
    track="#343330", good="#4cc38a", bad="#ff7a6b",
    colours=("#4d90e6", "#a9cdf7", "#dba11f", "#2aa37d", "#9b82e6", "#e5799a", "#5b5953",
             "#98968f"),
)  # fmt: skip


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on `colour` (WCAG's relative luminance)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # contrast with white is 1.05 / (L + 0.05), with black (L + 0.05) / 0.05
    return "#ffffff" if (luminance + 0.05) ** 2 < 1.05 * 0.05 else "#111111"
