"""Colours of the pictures, on light and on dark.

Six hues for what is held and two greys for what is lost, in the order in which they are stacked;
neighbours also differ in lightness, for eyes and printers that see no hues. Never the only carrier
of a meaning: every picture has its numbers beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.plan.estimate import MemoryClass

_ORDER = tuple(MemoryClass)


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
    classes: tuple[str, ...]  # by MemoryClass
    spans: tuple[str, ...]  # by label, repeated when there are more

    def of_class(self, name: MemoryClass) -> str:
        return self.classes[_ORDER.index(name)]

    def of_span(self, index: int) -> str:
        return self.spans[index % len(self.spans)]


LIGHT = Theme(
    page="#f6f6f4", card="#ffffff", ink="#1b1b1a", quiet="#5f5e5a", line="#deddd8",
    track="#e9e8e4", good="#0b7a3e", bad="#c2281d",
    classes=("#2a6fc9", "#86b6ee", "#e5a00d", "#0d7f5f", "#7b5cc9", "#d9577b", "#c9c7c0",
             "#85837c"),
    spans=("#2a6fc9", "#7b5cc9", "#0d7f5f", "#e5a00d", "#d9577b", "#86b6ee"),
)  # fmt: skip
DARK = Theme(
    page="#161615", card="#20201f", ink="#f1f0ec", quiet="#aeaca4", line="#3b3a37",
    track="#343330", good="#4cc38a", bad="#ff7a6b",
    classes=("#4d90e6", "#a9cdf7", "#dba11f", "#2aa37d", "#9b82e6", "#e5799a", "#5b5953",
             "#98968f"),
    spans=("#4d90e6", "#9b82e6", "#2aa37d", "#dba11f", "#e5799a", "#a9cdf7"),
)  # fmt: skip


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on `colour` (WCAG's relative luminance)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # contrast with white is 1.05 / (L + 0.05), with black (L + 0.05) / 0.05
    return "#ffffff" if (luminance + 0.05) ** 2 < 1.05 * 0.05 else "#111111"
