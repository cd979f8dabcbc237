"""Colours of pages, pictures and terminals, on light and on dark: one colour for one meaning.

A class of bytes has the same colour wherever it is drawn; what a step does has others, so that no
colour says two things on one page. Within each of the two sets any two colours differ for eyes that
see red, green or blue badly, too (tests/offload/test_pages.py holds both to that), and all stand
out from what they lie on at 3:1 or more. Never the only carrier of a meaning: every picture has
names and numbers beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What memory and files hold, in the order in which it is stacked.
CLASSES = (
    "parameters", "master", "gradients", "optimizer", "activations", "kv cache", "staging",
    "fragmentation", "framework",
)  # fmt: skip
# What a step does: the model's work (backward in a shade of its own), the optimizer's, each link's,
# and none.
WORK = (
    "compute", "backward", "update", "nvme read", "nvme write", "host to device",
    "device to host", "network", "waiting",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Theme:
    """One set of colours, as #rrggbb."""

    page: str
    card: str
    ink: str
    quiet: str  # less important text
    line: str
    track: str  # of a bar, behind what is filled
    good: str
    bad: str
    of: Mapping[str, str]  # by meaning: CLASSES and WORK


def _by_meaning(*colours: str) -> Mapping[str, str]:
    return dict(zip((*CLASSES, *WORK), colours, strict=True))


LIGHT = Theme(
    page="#f6f6f4", card="#ffffff", ink="#1b1b1a", quiet="#5f5e5a", line="#deddd8",
    track="#e9e8e4", good="#0b7a3e", bad="#c2281d",
    of=_by_meaning(
        "#4c95ee", "#076999", "#d9660c", "#1b4f12", "#8353db", "#470005", "#6e165f", "#8e8f8b",
        "#5b5a58", "#2b9f93", "#4f7e7b", "#5e3812", "#b84f2c", "#971646", "#1a3a9a", "#9c83de",
        "#853e77", "#a98d2d",
    ),
)  # fmt: skip
DARK = Theme(
    page="#161615", card="#20201f", ink="#f1f0ec", quiet="#aeaca4", line="#3b3a37",
    track="#343330", good="#4cc38a", bad="#ff7a6b",
    of=_by_meaning(
        "#256eb4", "#38c3fc", "#a35804", "#4db469", "#ad6df0", "#91ff67", "#f08bba", "#706a69",
        "#d5d0c8", "#51c1b6", "#86dcdd", "#c99c81", "#d8500d", "#cb6879", "#7488c7", "#b2a4f9",
        "#93598d", "#f1cd56",
    ),
)  # fmt: skip


def luminance(colour: str) -> float:
    """WCAG's relative luminance, 0 .. 1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on `colour`."""
    # contrast with white is 1.05 / (L + 0.05), with black (L + 0.05) / 0.05
    return "#ffffff" if (luminance(colour) + 0.05) ** 2 < 1.05 * 0.05 else "#000000"
