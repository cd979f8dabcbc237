"""Charts over the steps of a run, as inline SVG that keeps the size of text at any width.

Lines are drawn in a box of 1000 x 1000 that is stretched to the chart; texts and marks lie beside
it, at percentages. If there are many points, the means of neighbours are drawn, and around them a
paler band from the least to the greatest, so that no peak is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from offload.pages.svg import colour_class, percent

_HEIGHT, _TOP, _PLOT = 172, 12, 136  # in pixels: of all, above the plot, of the plot
_BUCKETS = 360  # of points, where there are more than twice as many
_MOST_DOTS = 200
_MARGIN = 0.02  # of the plot's height, above the greatest value
_LEAST, _MOST = 1e-9, 1e300  # of a range that can be divided; of a value that can be drawn


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or dots. `ys` are None where a value is unknown or not finite."""

    name: str
    xs: Sequence[float]  # rising
    ys: Sequence[float | None]
    kind: str = "line"  # or `wide`, `dashed`, `dots`
    meaning: str = ""  # of its colour; nothing: that of the text


def has_any(ys: Iterable[float | None]) -> bool:
    """Whether there is any value to draw."""
    return any(y is not None for y in ys)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring points: their beginning, and the least, mean and greatest of known values."""

    x: float
    least: float | None
    mean: float | None
    greatest: float | None


def buckets(xs: Sequence[float], ys: Sequence[float | None]) -> list[Bucket]:
    """Group points: one bucket each, or at most `_BUCKETS` of equally many points."""
    count = len(xs) if len(xs) <= 2 * _BUCKETS else _BUCKETS
    found = []
    for number in range(count):
        part = range(number * len(xs) // count, (number + 1) * len(xs) // count)
        known = [y for index in part if (y := ys[index]) is not None]
        if known:
            mean = sum(y / len(known) for y in known)
            found.append(Bucket(xs[part[0]], min(known), mean, max(known)))
        else:
            found.append(Bucket(xs[part[0]], None, None, None))
    return found


def line_chart(
    series: Sequence[Series], text: Callable[[float], str], *, base: float | None = 0.0,
    unit: float = 1.0, limit: tuple[str, float] | None = None, x_name: str = "step",
) -> str:  # fmt: skip
    """Draw the series on one scale from `base` (None: the least value) on; `text` formats a value.
    Marks are at round numbers of `unit`. `limit` is a name and a value, drawn as a dashed line."""
    series = [replace(each, ys=list(map(_within_bounds, each.ys))) for each in series]
    values = [y for each in series for y in each.ys if y is not None]
    xs = [x for each in series for ends in (each.xs[:1], each.xs[-1:]) for x in ends]
    if not values or not xs:
        return ""
    greatest = max(values) if limit is None else max(*values, limit[1])
    low, high = (min(values) if base is None else min(base, *values)), greatest
    if high - low <= max(_LEAST * max(abs(low), abs(high)), 1e-290):  # a line in the middle
        low, high = low - (abs(low) or 1.0) * (base is None), high + (abs(high) or 1.0)
    box = _Box(min(xs), max(xs), low, high + (high - low) * _MARGIN)
    axis, parts = _grid(box, text, unit)
    if limit is not None:
        at = box.pixel(limit[1])
        parts.append(
            f'<line x2="100%" y1="{at:.1f}" y2="{at:.1f}" class="limit"><title>'
            f"{escape(limit[0])}: {escape(text(limit[1]))}</title></line>"
        )
    lines = "".join(_line(box, each) for each in series if each.kind != "dots")
    parts.append(_plot(lines))
    alone = box.first == box.last  # one step is no line
    parts += [_dots(box, each, text) for each in series if each.kind == "dots" or alone]
    parts += _steps(box, x_name)
    said = "; ".join(filter(None, (_said(each, text) for each in series)))
    if limit is not None:
        said += f"; {limit[0]} {text(limit[1])}"
    return _chart(said, axis, parts)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stack, as a share of the whole at each place."""

    name: str
    meaning: str
    shares: Sequence[float]


def share_chart(xs: Sequence[float], layers: Sequence[Layer], x_name: str = "step") -> str:
    """Draw layers on top of each other, from 0 to 100 %."""
    if not xs:
        return ""
    box = _Box(min(xs), max(xs), 0.0, 1.0)
    below = [0.0] * len(xs)
    drawn = []
    for layer in layers:
        above = [low + share for low, share in zip(below, layer.shares, strict=True)]
        if len(xs) == 1:
            places, low, high = [box.first, box.first + 1.0], below * 2, above * 2
        else:
            places, low, high = list(xs), below, above
        there = [f"{box.x(x)} {box.y(y)}" for x, y in zip(places, high, strict=True)]
        back = [f"{box.x(x)} {box.y(y)}" for x, y in zip(places, low, strict=True)]
        drawn.append(
            f'<path d="M{"L".join([*there, *reversed(back)])}z" class="'
            f'{colour_class(layer.meaning)} layer"><title>{escape(layer.name)}</title></path>'
        )
        below = above
    axis, _ = _grid(box, lambda share: f"{share * 100:.0f} %", 1.0)
    said = "; ".join(f"{e.name} {sum(e.shares) / len(xs) * 100:.1f} %" for e in layers)
    parts = [_plot("".join(drawn)), *_steps(box, x_name)]
    return _chart(f"share of the time, on average: {said}", axis, parts)


# ---------------------------------------------------------------- inside
@dataclass(frozen=True, slots=True)
class _Box:
    first: float
    last: float
    low: float
    high: float

    def x(self, x: float) -> str:
        return f"{self.share(x) * 1000:.1f}".removesuffix(".0")

    def y(self, y: float) -> str:
        return f"{(1 - self.height(y)) * 1000:.1f}".removesuffix(".0")

    def share(self, x: float) -> float:
        return (x - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def height(self, y: float) -> float:
        return (y - self.low) / (self.high - self.low)

    def pixel(self, y: float) -> float:
        return _TOP + (1 - self.height(y)) * _PLOT


def _within_bounds(y: float | None) -> float | None:
    return None if y is None else max(-_MOST, min(_MOST, y))


def _line(box: _Box, series: Series) -> str:
    """The path of the means, and a band from the least to the greatest of several points."""
    runs: list[list[Bucket]] = [[]]
    for bucket in buckets(series.xs, series.ys):
        if bucket.mean is None:
            runs.append([])
        else:
            runs[-1].append(bucket)
    lines, bands = [], []
    for run in filter(None, runs):
        means = [f"{box.x(each.x)} {box.y(each.mean or 0.0)}" for each in run]
        # a point alone is a line of no length, with round ends
        lines.append(f"M{'L'.join(means if len(means) > 1 else means * 2)}")
        if len(series.xs) > len(run) > 1 and any(each.least != each.greatest for each in run):
            high = [f"{box.x(each.x)} {box.y(each.greatest or 0.0)}" for each in run]
            low = [f"{box.x(each.x)} {box.y(each.least or 0.0)}" for each in reversed(run)]
            bands.append(f"M{'L'.join([*high, *low])}z")
    if not lines:
        return ""
    colour = f" s-{colour_class(series.meaning)}" if series.meaning else ""
    band = f'<path d="{"".join(bands)}" class="band{colour}"/>' if bands else ""
    title = f"<title>{escape(series.name)}</title>"
    return f'{band}<path d="{"".join(lines)}" class="{series.kind}{colour}">{title}</path>'


def _dots(box: _Box, series: Series, text: Callable[[float], str]) -> str:
    known = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None]
    return "".join(
        f'<circle cx="{percent(box.share(x))}" cy="{box.pixel(y):.1f}" r="3" class="dot"><title>'
        f"{escape(series.name)}, {x:,.0f}: {escape(text(y))}</title></circle>"
        for x, y in known[:: max(1, -(-len(known) // _MOST_DOTS))]
    )


def round_numbers(low: float, high: float, wanted: int = 4) -> list[float]:
    """About `wanted` round numbers from `low` to `high`: 1, 2 or 5 times a power of ten."""
    length = high - low
    if not 1e-290 < length < math.inf:  # no power of ten divides it
        return [low]
    power = 10.0 ** math.floor(math.log10(length / wanted))
    width = next(power * f for f in (1, 2, 5, 10) if power * f * wanted >= length * 0.999)
    first = math.ceil(low / width - 1e-9)
    return [number * width for number in range(first, math.floor(high / width + 1e-9) + 1)]


def _grid(
    box: _Box, text: Callable[[float], str], unit: float
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The texts beside the plot, and the lines below it."""
    marks = [mark * unit for mark in round_numbers(box.low / unit, box.high / unit)]
    lines = [
        f'<line x2="100%" y1="{box.pixel(at):.1f}" y2="{box.pixel(at):.1f}" class="grid"/>'
        for at in marks
    ]
    texts = [
        f'<text x="100%" y="{box.pixel(at) + 4:.1f}" text-anchor="end" class="tick">'
        f"{escape(text(at))}</text>"
        for at in marks
    ]
    return texts, lines


def _steps(box: _Box, name: str) -> list[str]:
    """The labels of the first and the last step, and of round ones between them."""
    between = [m for m in round_numbers(box.first, box.last) if 0.2 < box.share(m) < 0.85]
    marks = [box.first, *(m for m in between if m == round(m)), box.last]
    parts = []
    for at in dict.fromkeys(marks):
        share = box.share(at)
        ends = {box.first: "start", box.last: "end"} if box.first < box.last else {}
        anchor = ends.get(at, "middle")
        said = f"{name} {at:,.0f}" if at == box.first else f"{at:,.0f}"
        parts.append(
            f'<text x="{percent(share)}" y="{_TOP + _PLOT + 17}" text-anchor="{anchor}" '
            f'class="tick">{escape(said)}</text>'
        )
    return parts


def _said(series: Series, text: Callable[[float], str]) -> str:
    known = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None]
    if not known:
        return ""
    (first, begin), (last, end) = known[0], known[-1]
    least, most = min(y for _, y in known), max(y for _, y in known)
    return (
        f"{series.name}: {text(begin)} at {first:,.0f}, {text(end)} at {last:,.0f}, "
        f"from {text(least)} to {text(most)}"
    )


def _plot(inside: str) -> str:
    return (
        f'<svg y="{_TOP}" height="{_PLOT}" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
        f"{inside}</svg>"
    )


def _chart(label: str, axis: Iterable[str], parts: Iterable[str]) -> str:
    return (
        f'<div class="chart"><svg class="scale" height="{_HEIGHT}" aria-hidden="true">'
        f'{"".join(axis)}</svg><svg height="{_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>"
    )
