"""Drawings of the HTML page: bars, gauges and the timeline, as inline SVG.

No drawing has a view box: positions are percentages and heights are fixed, so that text keeps its
size at any width. A label is drawn where it is sure to fit at `_LEAST_PX`; each lies in an inner
<svg>, which clips it, and every piece tells its name and value when pointed at.
"""

from __future__ import annotations

from html import escape

from offload.planning.plan.estimate import StepEstimate
from offload.tools.memest.show import view
from offload.tools.memest.show.view import Bar, Lane, Piece, Tick, step_length, ticks

_LEAST_PX = 560  # width of a drawing on a small laptop
_LETTER_PX = 7.2  # a wide letter of 12 px text, and its share of the margins
_GAP = 0.0012  # between neighbours, as a fraction


def gauge(bar: Bar) -> str:
    """A thin line: what is used of what is there."""
    state = "good" if bar.fits else "bad"
    stop, limit = bar.gauge_peak, bar.gauge_capacity
    parts = [
        f'<rect width="{_percent(limit)}" y="4" height="6" rx="3" fill="var(--track)"/>',
        f'<rect width="{_percent(max(stop, 0.002))}" y="4" height="6" rx="3" '
        f'fill="var(--{state})"/>',
    ]
    if not bar.fits:
        parts.append(
            f'<rect x="{_percent(min(limit, 0.997))}" y="0" width="3" height="14" '
            'fill="var(--ink)"><title>capacity</title></rect>'
        )
    return _svg("gauge", f"{bar.title}: {view.used_text(bar)}", parts)


def stack(bar: Bar) -> str:
    """The peak by class, as wide as the page."""
    return _svg("stack", f"{bar.title}, peak by class", [_piece(each, 34) for each in bar.pieces])


def lane(lane: Lane) -> str:
    """What one link does during the step."""
    axis = '<rect y="25" width="100%" height="1" fill="var(--line)"/>'
    pieces = [_piece(each, 24) for each in lane.pieces]
    return _svg("lane", f"{lane.link} during one step", [axis, *pieces])


def axis(step: StepEstimate) -> str:
    """Round times below the lanes."""
    return _svg("axis", "time", [_tick(tick) for tick in ticks(step_length(step))])


def _piece(piece: Piece, height: int) -> str:
    """One coloured stretch with its label, where the label fits."""
    width = max(piece.stop - piece.start - _GAP, 0.0015)
    inside = f'<rect width="100%" height="100%" rx="2" class="c-{piece.colour}"/>'
    if width * _LEAST_PX >= len(piece.label) * _LETTER_PX + 8:
        inside += (
            f'<text x="50%" y="{height / 2 + 4:g}" text-anchor="middle" class="i-{piece.colour}">'
            f"{escape(piece.label)}</text>"
        )
    return (
        f'<svg x="{_percent(piece.start)}" width="{_percent(width)}" height="{height}">'
        f"{inside}<title>{escape(piece.label)}: {piece.value} ({piece.share})</title></svg>"
    )


def _tick(tick: Tick) -> str:
    anchor = "start" if tick.at < 0.03 else "end" if tick.at > 0.97 else "middle"
    at = _percent(tick.at)
    return (
        f'<rect x="{at}" y="0" width="1" height="4" fill="var(--quiet)"/>'
        f'<text x="{at}" y="18" text-anchor="{anchor}" fill="var(--quiet)">{tick.text}</text>'
    )


def _svg(kind: str, label: str, parts: list[str]) -> str:
    inside = "".join(parts)
    return f'<svg class="{kind}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.4g}%"
