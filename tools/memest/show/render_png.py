"""An estimate as one PNG: a bar per place, the step's timeline, the key figures."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload.pages.colours import DARK, LIGHT, Theme, ink_on
from offload.pages.ticks import ticks
from offload.planning.plan.estimate import Estimate, StepEstimate
from offload.tiers.errors import ConfigError
from offload.tools.memest.show import view
from offload.tools.memest.show.view import (
    Bar,
    Piece,
    bars,
    lanes,
    span_colours,
    step_length,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths in inches, from the upper left corner; text sizes in points.
_WIDTH, _MARGIN = 9.6, 0.3
_INNER = _WIDTH - 2 * _MARGIN
_HEAD, _BAR, _LANE, _LANE_NAMES = 1.4, 0.4, 0.36, 1.25
_TITLE, _TICKS, _KEY_LINE, _KEYS_PER_LINE, _GAP = 0.3, 0.25, 0.21, 4, 0.25
_LETTER = 0.092  # of 9 point text, a wide one
_DPI = 150


def to_png(estimate: Estimate, *, dark: bool = False) -> bytes:
    """The file's bytes. ConfigError where matplotlib is not installed."""
    figure = draw(estimate, DARK if dark else LIGHT)
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=figure.get_facecolor())
    return file.getvalue()


def draw(estimate: Estimate, theme: Theme) -> Figure:
    """The picture. ConfigError where matplotlib is not installed."""
    shown, step = bars(estimate.memory), estimate.step
    heights = [_BAR + _below(len(bar.pieces)) for bar in shown]
    if step is not None and step.spans:
        heights.append(_LANE * len(lanes(step)) + _TICKS + _below(len(span_colours(step))))
    page = _Page(_HEAD + sum(heights) + len(heights) * _TITLE + _MARGIN, theme)
    _head(page, estimate)
    for bar in shown:
        _place(page, bar)
    if step is not None and step.spans:
        _timeline(page, step)
    return page.figure


def _below(keys: int) -> float:
    """What a drawing's key takes, and the gap to what follows."""
    return _KEY_LINE * math.ceil(keys / _KEYS_PER_LINE) + _GAP


class _Page:
    """A figure that is filled from its top. ConfigError where matplotlib is not installed."""

    def __init__(self, height: float, theme: Theme) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError(
                "--format png needs matplotlib; pip install 'offload[report]', or use --format html"
            ) from None
        self.figure: Figure = Figure(figsize=(_WIDTH, height), facecolor=theme.page, dpi=_DPI)
        self.theme = theme
        self._height, self._top = height, _HEAD

    def text(self, top: float, text: str, size: float, colour: str, **style: Any) -> None:
        """One line, cut where the page ends."""
        letters = int(_INNER / (_LETTER * 0.92 * size / 9))
        text = text if len(text) <= letters else text[: letters - 1] + "…"
        style = {"fontsize": size, "color": colour, "va": "center", "parse_math": False, **style}
        self.figure.text(_MARGIN / _WIDTH, 1 - top / self._height, text, **style)

    def drawing(self, title: str, height: float, keys: Mapping[str, int], left: float = 0) -> Axes:
        """An area below the last one, its x from 0 to 1; below it what colours stand for."""
        from matplotlib.patches import Patch

        self._top += _TITLE + height
        width, start = _INNER - left, -left / (_INNER - left)
        bottom = 1 - self._top / self._height
        axes = self.figure.add_axes(
            ((_MARGIN + left) / _WIDTH, bottom, width / _WIDTH, height / self._height), xlim=(0, 1)
        )
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=9, labelcolor=self.theme.ink)
        axes.set_title(title, loc="left", x=start, parse_math=False, fontsize=10, weight="bold",
                       color=self.theme.ink)  # fmt: skip
        ticks_below = _TICKS if left else 0.0
        axes.legend(
            [Patch(color=self.theme.colours[colour]) for colour in keys.values()], list(keys),
            ncols=_KEYS_PER_LINE, loc="upper left", frameon=False, fontsize=8.5, borderpad=0,
            borderaxespad=0, handlelength=0.9, handleheight=0.9, labelcolor=self.theme.ink,
            bbox_to_anchor=(start, -(ticks_below + 0.06) / height),
        )  # fmt: skip
        self._top += ticks_below + _below(len(keys))
        return axes


def _head(page: _Page, estimate: Estimate) -> None:
    theme = page.theme
    colour = theme.good if estimate.fits else theme.bad
    page.text(0.25, estimate.model, 14, theme.ink, weight="bold")
    page.text(0.51, view.verdict(estimate), 11, colour, weight="bold")
    page.text(0.74, view.what_text(estimate), 9, theme.quiet)
    page.text(0.93, view.where_text(estimate), 9, theme.quiet)
    figures = " · ".join(f"{each.name} {each.value}" for each in view.figures(estimate))
    page.text(1.12, figures, 9, theme.ink)


def _place(page: _Page, bar: Bar) -> None:
    """A gauge, and the classes below it."""
    theme = page.theme
    keys = {f"{piece.label} {piece.value}": piece.colour for piece in bar.pieces}
    axes = page.drawing(bar.title, _BAR, keys)
    axes.set(xticks=[], yticks=[], ylim=(0, _BAR))
    state = theme.good if bar.fits else theme.bad
    used = theme.ink if bar.fits else theme.bad
    axes.set_title(view.used_text(bar), loc="right", fontsize=9, color=used)
    axes.barh(0.36, bar.gauge_capacity, 0.06, color=theme.track)
    axes.barh(0.36, max(bar.gauge_peak, 0.002), 0.06, color=state)
    if not bar.fits:
        axes.barh(0.36, 0.004, 0.1, left=min(bar.gauge_capacity, 0.996), color=theme.ink)
    for piece in bar.pieces:
        _piece(axes, piece, 0.15, 0.3, theme, _INNER)


def _timeline(page: _Page, step: StepEstimate) -> None:
    """One lane per link, the first on top; the time below."""
    theme, rows = page.theme, lanes(step)
    height = _LANE * len(rows)
    axes = page.drawing(view.step_text(step), height, span_colours(step), left=_LANE_NAMES)
    middles = [height - _LANE * (index + 0.5) for index in range(len(rows))]
    axes.set(ylim=(0, height), yticks=middles, yticklabels=[lane.link for lane in rows])
    for middle, lane in zip(middles, rows, strict=True):
        axes.axhline(middle - 0.48 * _LANE, color=theme.line, linewidth=0.8)
        for piece in lane.pieces:
            _piece(axes, piece, middle, 0.75 * _LANE, theme, _INNER - _LANE_NAMES)
    marks = ticks(step_length(step))
    axes.set_xticks([mark.at for mark in marks], [mark.text for mark in marks], color=theme.quiet)
    if marks[-1].at > 0.97:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")


def _piece(axes: Axes, piece: Piece, y: float, height: float, theme: Theme, inches: float) -> None:
    """One coloured stretch with its label, where the label fits."""
    width = max(piece.stop - piece.start, 0.0015)
    colour = theme.colours[piece.colour]
    line = 0.7 if width > 0.004 else 0.0
    axes.barh(y, width, height, left=piece.start, color=colour, edgecolor=theme.page,
              linewidth=line)  # fmt: skip
    if width * inches >= (len(piece.label) + 1) * _LETTER:
        style: dict[str, Any] = {"color": ink_on(colour), "fontsize": 8.5, "parse_math": False}
        axes.text(piece.start + width / 2, y, piece.label, va="center_baseline", ha="center",
                  **style)  # fmt: skip
