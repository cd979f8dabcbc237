"""Pages: colours that can be told apart, and text that can be read on them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.pages.colours import CLASSES, DARK, LIGHT, WORK, Theme, ink_on, luminance
from offload.pages.html_page import key, lines, page, table
from offload.planning.plan.estimate import MemoryClass

both = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])

# What eyes without one kind of cones see, on linear RGB: Machado, Oliveira and Fernandes 2009,
# tables for severity 1. First those that see all.
_EYES = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
     (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
     (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
     (0.004733, 0.691367, 0.303900)),
)  # fmt: skip
# To OKLab (Ottosson 2020), in which distances are about as large as they look.
_CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
          (0.0883024619, 0.2817188376, 0.6299787005))  # fmt: skip
_LAB = ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660))  # fmt: skip


def seen(colour: str, eyes: object) -> NDArray[np.float64]:
    """In OKLab, in hundredths."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    light = np.clip(np.array(eyes) @ linear, 0, 1)
    found: NDArray[np.float64] = 100 * (np.array(_LAB) @ np.cbrt(np.array(_CONES) @ light))
    return found


def apart(a: str, b: str, eyes: object = _EYES[0]) -> float:
    return float(np.linalg.norm(seen(a, eyes) - seen(b, eyes)))


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_classes_of_bytes_are_the_planner_s() -> None:
    assert tuple(MemoryClass) == CLASSES
    assert tuple(LIGHT.of) == tuple(DARK.of) == (*CLASSES, *WORK)


@both
@pytest.mark.parametrize("eyes", _EYES, ids=["all cones", "no red", "no green", "no blue"])
def test_colours_of_one_set_are_apart_for_all_eyes(theme: Theme, eyes: object) -> None:
    for names, least in ((CLASSES, 9.0), (WORK, 7.0)):
        for a, b in combinations(names, 2):
            assert apart(theme.of[a], theme.of[b], eyes) > least, (a, b)


@both
def test_no_two_meanings_look_alike(theme: Theme) -> None:
    for a, b in combinations(theme.of, 2):
        assert apart(theme.of[a], theme.of[b]) > 7.0, (a, b)


@both
def test_everything_stands_out_and_can_be_read(theme: Theme) -> None:
    for meaning, colour in theme.of.items():
        assert contrast(colour, theme.card) >= 3.0, meaning
        assert contrast(ink_on(colour), colour) >= 4.5, meaning
    for ink in (theme.ink, theme.quiet, theme.good, theme.bad):
        assert contrast(ink, theme.card) >= 4.5
        assert contrast(ink, theme.page) >= 4.5


def test_a_terminal_of_256_colours_keeps_the_classes_apart() -> None:
    from rich.color import Color, ColorSystem

    numbers = [Color.parse(DARK.of[name]).downgrade(ColorSystem.EIGHT_BIT) for name in CLASSES]
    assert len(set(numbers)) == len(CLASSES)


def test_a_page_has_both_schemes_and_a_rule_for_every_colour() -> None:
    text = page("<a>", "", by="memest")
    assert "<title>&lt;a&gt;</title>" in text
    assert "screen and (prefers-color-scheme:dark)" in text
    for name in ("c-nvme-read", "c-parameters", "c-waiting"):
        assert f".{name}{{fill:var(--{name})" in text
        assert text.count(f"--{name}:#") == 2


def test_pieces_of_a_page_are_escaped_and_may_be_empty() -> None:
    assert lines([]) == key([]) == ""
    assert "&lt;b&gt;" in lines(["<b>"])
    assert "&lt;b&gt;" in key([("waiting", "<b>")])
    text = table(("<b>", "n"), [("cell", "1")], stacked=True)
    assert text.count("&lt;b&gt;") == 2  # as a head, and before the cell where rows are stacked
    assert text.count('class="number"') == 2
    assert "<thead>" not in table(("", ""), [("a", "b")])
