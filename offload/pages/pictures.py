"""Pictures of a page, drawn by matplotlib as SVG that is part of the page.

Colours of the page's style sheet stand in for matplotlib's, so that pictures are light or dark as
the page is. matplotlib is imported when the first picture is drawn.

A class of bytes has the same colour wherever it is drawn, on pages and terminals. Any two colours
differ for eyes that see red, green or blue badly, too, and all stand out from what they lie on at
3:1 or more (tests/offload/test_pages.py). They are never the only carrier of a meaning: every
picture has names and numbers beside it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offload.display.plain_text import plain

# What memory and files hold, in the order in which it is stacked.
CLASSES = (
    "parameters", "master", "gradients", "optimizer", "activations", "kv cache", "staging",
    "fragmentation", "framework",
)  # fmt: skip

# As #rrggbb, by meaning.
LIGHT = dict(zip(CLASSES, (
    "#4c95ee", "#076999", "#d9660c", "#1b4f12", "#8353db", "#470005", "#6e165f", "#8e8f8b",
    "#5b5a58",
), strict=True))  # fmt: skip
DARK = dict(zip(CLASSES, (
    "#256eb4", "#38c3fc", "#a35804", "#4db469", "#ad6df0", "#91ff67", "#f08bba", "#706a69",
    "#d5d0c8",
), strict=True))  # fmt: skip

_INK, _LINE = "#1b1b1a", "#deddd8"  # these stand for var(--ink) and var(--line) below
_WIDTH = 9.4  # inches, of 100 pixels
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "offload", "text.parse_math": False,
    "font.family": "sans-serif", "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.color": _INK, "ytick.color": _INK, "grid.color": _LINE, "legend.frameon": False,
    "figure.constrained_layout.use": True, "path.simplify_threshold": 1.0,
}  # fmt: skip

Text = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG drawing, and what it shows in words, for those who cannot see it."""

    svg: str
    label: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A coloured part of a bar."""

    meaning: str  # of its colour
    start: float
    stop: float


def bar_picture(
    bars: Mapping[str, Sequence[Stretch]], text: Text, *, label: str, line: float | None = None
) -> Picture:
    """Draw one bar or lane per name, the first on top, all on one scale from 0 on. `text` formats a
    place on it; `line` marks one; `label` says in words what is shown."""
    from matplotlib.patches import Patch

    with _figure(0.65 + 0.3 * max(2, len(bars))) as (axes, picture):
        for row, stretches in enumerate(bars.values()):
            spans = [(each.start, each.stop - each.start) for each in stretches]
            colours = [LIGHT[each.meaning] for each in stretches]
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=colours)
        axes.set_yticks(range(len(bars)), [_name(name) for name in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        if line is not None:
            axes.axvline(line, color=_INK, linewidth=1.5)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda x, _: text(x))
        axes.tick_params(axis="y", length=0)
        used = {each.meaning for stretches in bars.values() for each in stretches}
        patches = [Patch(color=c, label=meaning) for meaning, c in LIGHT.items() if meaning in used]
        legend = {"ncols": 5, "loc": "outside lower left", "handlelength": 1}
        axes.figure.legend(handles=patches, **legend)
    return Picture(picture(), label)


@contextmanager
def _figure(height: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Yield axes to draw on, and what gives the SVG of the drawing once the block has ended."""
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), dpi=100)
        yield figure.add_subplot(), lambda: _inline(file.getvalue())
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


def _inline(svg: str) -> str:
    """Return the element alone, with colours of the page, and names that are of no use on it left
    out: several drawings on one page would have the same."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z0-9]+_\d+"', "", svg)
    for name, colour in {"ink": _INK, "line": _LINE, **LIGHT}.items():
        svg = svg.replace(colour, f"var(--{name.replace(' ', '-')})")
    return svg


def _name(name: str) -> str:
    return plain(name, 40)
