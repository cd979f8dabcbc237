"""Drawings of the HTML page: bars, gauges and the timeline, as inline SVG."""

from __future__ import annotations

from offload.pages.svg import drawing, mark, percent, stretch
from offload.pages.ticks import ticks
from offload.planning.plan.estimate import StepEstimate
from offload.tools.memest.show import view
from offload.tools.memest.show.view import Bar, Lane, Piece, step_length


def gauge(bar: Bar) -> str:
    """A thin line: what is used of what is there."""
    state = "good" if bar.fits else "bad"
    stop, limit = bar.gauge_peak, bar.gauge_capacity
    parts = [
        f'<rect width="{percent(limit)}" y="4" height="6" rx="3" fill="var(--track)"/>',
        f'<rect width="{percent(max(stop, 0.002))}" y="4" height="6" rx="3" '
        f'fill="var(--{state})"/>',
    ]
    if not bar.fits:
        parts.append(
            f'<rect x="{percent(min(limit, 0.997))}" y="0" width="3" height="14" '
            'fill="var(--ink)"><title>capacity</title></rect>'
        )
    return drawing("gauge", f"{bar.title}: {view.used_text(bar)}", parts)


def stack(bar: Bar) -> str:
    """The peak by class, as wide as the page."""
    return drawing(
        "stack", f"{bar.title}, peak by class", [_piece(each, 34) for each in bar.pieces]
    )


def lane(lane: Lane) -> str:
    """What one link does during the step."""
    axis = '<rect y="25" width="100%" height="1" fill="var(--line)"/>'
    pieces = [_piece(each, 24) for each in lane.pieces]
    return drawing("lane", f"{lane.link} during one step", [axis, *pieces])


def axis(step: StepEstimate) -> str:
    """Round times below the lanes."""
    return drawing("axis", "time", [mark(tick) for tick in ticks(step_length(step))])


def _piece(piece: Piece, height: int) -> str:
    """One coloured stretch with its label, where the label fits."""
    tip = f"{piece.label}: {piece.value} ({piece.share})"
    return stretch(piece.start, piece.stop, height, piece.colour, piece.label, tip)
