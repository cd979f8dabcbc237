"""Pages: colours that can be told apart, and text that can be read on them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.pages.page import Cell, Figure, Page, Section, Table, to_html
from offload.pages.pictures import DARK, LIGHT

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


@both
@pytest.mark.parametrize("eyes", _EYES, ids=["all cones", "no red", "no green", "no blue"])
def test_colours_are_apart_for_all_eyes(theme: dict[str, str], eyes: object) -> None:
    for a, b in combinations(theme, 2):
        assert apart(theme[a], theme[b], eyes) > 9.0, (a, b)


def test_a_page_has_both_schemes_and_escapes_all_texts() -> None:
    evil = "<script>&\x1b[31m"
    cell = Cell(evil, code=[evil], meaning="kv cache", state="bad", strong=True)
    section = Section(evil, tables=[Table([evil, "n"], [[cell, "1"]])], lines=[evil])
    figure = Figure(evil, evil, evil)
    html = to_html(Page(evil, evil, [evil], evil, "good", [figure], [section]), by=evil)
    assert html.count("&lt;script&gt;&amp;\\x1b[31m") == 13
    assert "<script" not in html
    assert "\x1b" not in html
    assert "screen and (prefers-color-scheme: dark)" in html
    assert html.count("--kv-cache: #") == 2
    assert 'class="swatch" style="background: var(--kv-cache)"' in html
