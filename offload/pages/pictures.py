"""Line pictures of a page, drawn by matplotlib as SVG that is part of the page.

Colours of the page's style sheet stand in for matplotlib's, so that pictures are light or dark as
the page is. matplotlib (the extra `report`) is imported when the first picture is drawn.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.display.plain_text import plain

# Colours by their names in page.html, as matplotlib is given them.
_COLOURS = {
    "ink": "#1b1b1a", "line": "#deddd8", "first": "#4c95ee", "second": "#d9660c",
    "third": "#8353db",
}  # fmt: skip
_INK, _LINE, *_OTHERS = _COLOURS.values()
_SIZE = 9.4, 2.3  # inches, of 100 pixels
_LINE_COLOURS = (_INK, *_OTHERS)
_MAX_VALUE = 1e100  # that can be drawn
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "offload", "text.parse_math": False,
    "font.family": "sans-serif", "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.color": _INK, "ytick.color": _INK, "grid.color": _LINE, "legend.frameon": False,
    "figure.constrained_layout.use": True, "path.simplify_threshold": 1.0,
}  # fmt: skip

Text = Callable[[float], str]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG drawing, and what it shows in words, for those who cannot see it."""

    svg: str
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line over steps; nan is unknown."""

    name: str
    xs: npt.ArrayLike  # ascending
    ys: npt.ArrayLike


def line_picture(
    title: str, lines: Sequence[Line], text: Text, *, from_zero: bool = False
) -> Picture:
    """Draw lines over steps on one scale; `text` formats a value."""
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, dpi=100)
        axes: Any = figure.add_subplot()
        for colour, line in zip(_LINE_COLOURS * len(lines), lines, strict=False):
            xs, ys = line.xs, np.clip(np.asarray(line.ys, float), -_MAX_VALUE, _MAX_VALUE)
            # markers show a value without neighbours
            axes.plot(xs, ys, color=colour, linewidth=1.4, label=plain(line.name, 40),
                      marker="." if np.isfinite(ys).sum() < 30 else None)  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.margins(x=0)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda y, _: text(y))
        axes.grid(axis="y")
        if len(lines) > 1:
            axes.legend(ncols=len(lines), loc="best")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    said = (_said(line, text) for line in lines)
    return Picture(_inline(file.getvalue()), f"{title}: {'; '.join(filter(None, said))}")


def _inline(svg: str) -> str:
    """Return the element alone, with colours of the page, and names that are of no use on it left
    out: several drawings on one page would have the same."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z0-9]+_\d+"', "", svg)
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def _said(line: Line, text: Text) -> str:
    xs, ys = np.asarray(line.xs, float), np.asarray(line.ys, float)
    known = np.flatnonzero(~np.isnan(ys))
    if not len(known):
        return ""
    ends = (f"{text(ys[at])} at {xs[at]:,.0f}" for at in (known[0], known[-1]))
    return f"{line.name}: {', '.join(ends)}"
