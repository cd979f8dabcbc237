"""An estimate as one PNG: a bar per place, the step's timeline, the key figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.planning.plan.estimate import Estimate, StepEstimate
from offload.tiers.errors import ConfigError
from offload.tiers.units import format_bytes
from offload.tools.memest import summary, wording
from offload.tools.memest.colours import DARK, LIGHT, Theme, ink_on
from offload.tools.memest.picture import Bar, bars, labels, lanes, step_length, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths in inches, from the upper left corner; text sizes in points.
_WIDTH, _MARGIN = 9.6, 0.3
_INNER = _WIDTH - 2 * _MARGIN
_LINE, _HEAD = 0.21, 1.4
_LETTER = 0.092  # of 9 point text, a wide one
_GAUGE, _STACK, _LANE, _LANE_NAMES = 0.26, 0.40, 0.36, 1.25
_DPI = 150

Keys = Sequence[tuple[str, str]]  # text and colour


def to_png(estimate: Estimate, *, dark: bool = False) -> bytes:
    """The file's bytes. ConfigError where matplotlib is not installed."""
    figure = draw(estimate, DARK if dark else LIGHT)
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=figure.get_facecolor())
    return file.getvalue()


def draw(estimate: Estimate, theme: Theme) -> Figure:
    """The picture. ConfigError where matplotlib is not installed."""
    figure_class = _figure_class()
    shown = bars(estimate.memory)
    step = estimate.step if estimate.step is not None and estimate.step.spans else None
    height = _HEAD + sum(map(_place_height, shown)) + (_step_height(step) if step else 0) + _MARGIN
    figure: Figure = figure_class(figsize=(_WIDTH, height), facecolor=theme.page, dpi=_DPI)
    page = _Page(figure, height, theme)
    _title(page, estimate)
    top = _HEAD
    for bar in shown:
        _place(page, top, bar)
        top += _place_height(bar)
    if step:
        _timeline(page, top, step)
    return figure


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--format png needs matplotlib; pip install 'offload[report]', or use --format html"
        ) from None
    return Figure


@dataclass(frozen=True)
class _Page:
    """A figure that is drawn on in inches."""

    figure: Figure
    height: float
    theme: Theme

    def text(self, left: float, top: float, text: str, **style: Any) -> None:
        style = {"fontsize": 9, "color": self.theme.ink, "va": "center", **style}
        x, y = left / _WIDTH, 1 - top / self.height
        self.figure.text(x, y, text, parse_math=False, **style)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """An area whose x runs from 0 to 1, without a frame."""
        bottom = 1 - (top + height) / self.height
        axes = self.figure.add_axes(
            (left / _WIDTH, bottom, width / _WIDTH, height / self.height), xlim=(0, 1), ylim=(0, 1)
        )
        axes.axis("off")
        return axes


def _title(page: _Page, estimate: Estimate) -> None:
    theme = page.theme
    colour = theme.good if estimate.fits else theme.bad
    page.text(_MARGIN, 0.25, _clipped(estimate.model, 14), fontsize=14, weight="bold")
    verdict = _clipped(summary.verdict(estimate), 11)
    page.text(_MARGIN, 0.51, verdict, fontsize=11, weight="bold", color=colour)
    lines = [
        (f"{summary.model_text(estimate)} · {summary.state_text(estimate)}", theme.quiet),
        (f"{estimate.hardware} · {summary.workload_text(estimate)}", theme.quiet),
        (" · ".join(f"{f.name} {f.value}" for f in summary.figures(estimate)), theme.ink),
    ]
    for index, (line, ink) in enumerate(lines):
        page.text(_MARGIN, 0.74 + index * 0.19, _clipped(line, 9), color=ink)


def _clipped(text: str, size: float) -> str:
    """What fits on one line of the page at `size` points."""
    letters = int(_INNER / (_LETTER * 0.92 * size / 9))
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _place(page: _Page, top: float, bar: Bar) -> None:
    """A gauge, the classes, and a key with every value."""
    theme = page.theme
    used = f"{format_bytes(bar.peak_nbytes)} of {format_bytes(bar.capacity_nbytes)}"
    if bar.capacity_nbytes:
        used += f" ({wording.share(bar.filled)})"
    page.text(_MARGIN, top + 0.1, bar.title, fontsize=10, weight="bold")
    ink = theme.ink if bar.fits else theme.bad
    page.text(_WIDTH - _MARGIN, top + 0.1, used, color=ink, ha="right")
    gauge = page.axes(_MARGIN, top + _GAUGE, _INNER, 0.09)
    gauge.barh(0.5, bar.gauge_capacity, 0.7, color=theme.track)
    gauge.barh(0.5, max(bar.gauge_peak, 0.002), 0.7, color=theme.good if bar.fits else theme.bad)
    if not bar.fits:
        gauge.axvline(min(bar.gauge_capacity, 0.998), color=theme.ink, linewidth=2.5)
    stack = page.axes(_MARGIN, top + _STACK, _INNER, 0.3)
    for s in bar.segments:
        _piece(stack, 0.5, 1.0, s.start, s.stop, str(s.name), theme.of_class(s.name), _INNER)
    _key(page, top + _STACK + 0.42, _bar_keys(bar, theme))


def _bar_keys(bar: Bar, theme: Theme) -> Keys:
    return [
        (f"{s.name} {format_bytes(s.nbytes)}", theme.of_class(s.name)) for s in bar.segments
    ]  # fmt: skip


def _place_height(bar: Bar) -> float:
    return _STACK + 0.42 + _LINE * len(_key_lines(_bar_keys(bar, LIGHT))) + 0.16


def _key(page: _Page, top: float, keys: Keys) -> None:
    for index, line in enumerate(_key_lines(keys)):
        left = _MARGIN
        for text, colour in line:
            y = top + index * _LINE
            page.text(left, y, "■", color=colour)
            page.text(left + 0.16, y, text, fontsize=8.5)
            left += _key_width(text)


def _key_lines(keys: Keys) -> list[Keys]:
    """As many of them on a line as fit."""
    lines: list[list[tuple[str, str]]] = [[]]
    left = 0.0
    for key in keys:
        if left + _key_width(key[0]) > _INNER and lines[-1]:
            lines.append([])
            left = 0.0
        lines[-1].append(key)
        left += _key_width(key[0])
    return list(lines)


def _key_width(text: str) -> float:
    return 0.42 + len(text) * _LETTER * 8.5 / 9


def _timeline(page: _Page, top: float, step: StepEstimate) -> None:
    """One lane per link, the first on top; the time below; a key of all that is done."""
    theme, rows, names = page.theme, lanes(step), labels(step)
    title = f"One step: {wording.duration(step.seconds)}, bound by {step.bottleneck}"
    page.text(_MARGIN, top + 0.1, title, fontsize=10, weight="bold")
    top += 0.3
    left, width = _MARGIN + _LANE_NAMES, _INNER - _LANE_NAMES
    for lane in rows:
        page.text(left - 0.1, top + _LANE / 2, lane.link, ha="right")
        axes = page.axes(left, top, width, _LANE)
        axes.axhline(0.04, color=theme.line, linewidth=0.8)
        for block in lane.blocks:
            colour = theme.of_span(names.index(block.label))
            _piece(axes, 0.53, 0.75, block.start, block.stop, block.label, colour, width)
        top += _LANE
    for tick in ticks(step_length(step)):
        side = "right" if tick.at > 0.97 else "center"
        page.text(left + tick.at * width, top + 0.1, tick.text, color=theme.quiet, ha=side)
    _key(page, top + 0.36, _span_keys(step, theme))


def _span_keys(step: StepEstimate, theme: Theme) -> Keys:
    return [(label, theme.of_span(index)) for index, label in enumerate(labels(step))]


def _step_height(step: StepEstimate) -> float:
    return 0.3 + _LANE * len(lanes(step)) + 0.36 + _LINE * len(_key_lines(_span_keys(step, LIGHT)))


def _piece(
    axes: Axes, y: float, height: float, start: float, stop: float, label: str, colour: str,
    inches: float,
) -> None:  # fmt: skip
    """One coloured stretch with its label, where the label fits."""
    width = max(stop - start, 0.0015)
    edge = axes.figure.get_facecolor()
    line = 0.7 if width > 0.004 else 0.0
    axes.barh(y, width, height, left=start, color=colour, edgecolor=edge, linewidth=line)
    if width * inches >= (len(label) + 1) * _LETTER:
        style: dict[str, Any] = {"color": ink_on(colour), "fontsize": 8.5, "parse_math": False}
        axes.text(start + width / 2, y, label, va="center_baseline", ha="center", **style)
