"""Colours of pages and terminals, on light and on dark: one colour for one meaning.

A class of bytes has the same colour wherever it is drawn; what a step does has others, so that no
colour says two things on one page. Within each of the two sets any two colours differ for eyes that
see red, green or blue badly, too (tests/offload/test_pages.py holds both to that), and all stand
out from what they lie on at 3:1 or more. Never the only carrier of a meaning: every picture has
names and numbers beside it.
"""

from __future__ import annotations

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

# As #rrggbb, by meaning.
LIGHT = dict(zip((*CLASSES, *WORK), (
    "#4c95ee", "#076999", "#d9660c", "#1b4f12", "#8353db", "#470005", "#6e165f", "#8e8f8b",
    "#5b5a58", "#2b9f93", "#4f7e7b", "#5e3812", "#b84f2c", "#971646", "#1a3a9a", "#9c83de",
    "#853e77", "#a98d2d",
), strict=True))  # fmt: skip
DARK = dict(zip((*CLASSES, *WORK), (
    "#256eb4", "#38c3fc", "#a35804", "#4db469", "#ad6df0", "#91ff67", "#f08bba", "#706a69",
    "#d5d0c8", "#51c1b6", "#86dcdd", "#c99c81", "#d8500d", "#cb6879", "#7488c7", "#b2a4f9",
    "#93598d", "#f1cd56",
), strict=True))  # fmt: skip
