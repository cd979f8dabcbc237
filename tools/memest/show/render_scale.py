"""The answer of `memest scale` as one HTML file: no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.estimate.scaling import Point, Series
from offload.tools.memest.show import wording
from offload.tools.memest.show.colours import SPANS
from offload.tools.memest.show.html_page import key, lines, page, table
from offload.tools.memest.show.scale_wording import LEGEND, cells, statements
from offload.tools.memest.show.summary import homes_text

_SHOWN = 8  # collectives at the beginning of a step, and at its end
_WORK, _WAIT = SPANS[0], SPANS[3]  # colours
_BELOW = 'style="margin-top:12px"'


def to_html(question: Question, found: Sequence[Series]) -> str:
    """The page. All text is escaped."""
    case = question.case
    title = f"{case.source.name}, from one GPU to {found[0].points[-1].ranks:,}"
    longest_s = max(point.step.seconds for series in found for point in series.points)
    series = "".join(_series(series, longest_s) for series in found)
    said = lines("What is simulated, and what the numbers are from", statements(question, found))
    body = (
        f'<h1>{escape(title)}</h1><p class="quiet">{escape(_workload(question))}</p>'
        f'<p class="verdict">simulated: nothing was measured on such a cluster</p>{series}{said}'
    )
    return page(title, body, wide=True)


def _workload(question: Question) -> str:
    case = question.case
    work = case.workload
    return (
        f"machines: {case.profile.name} · each rank {work.batch} x {work.sequence:,} tokens, "
        f"{work.passes} to a step · precision {case.config.precision}"
    )


def _series(series: Series, longest_s: float) -> str:
    return (
        f"<h2>{escape(series.name)}</h2>{_bars(series, longest_s)}{_table(series)}"
        f"{_collectives(series.points[-1])}"
    )


def _bars(series: Series, longest_s: float) -> str:
    rows = (
        (f"{point.ranks:,}", wording.duration(point.step.seconds), _bar(point, longest_s))
        for point in series.points
    )
    keys = key([(_WORK, "the model computes"), (_WAIT, "it waits")])
    return (
        '<div class="card"><b>One step, by number of ranks</b>'
        f"{table(['ranks', 'step', ''], rows, left=[2], kind='bars')}{keys}</div>"
    )


def _bar(point: Point, longest_s: float) -> str:
    """As long as the step against the longest of the page."""
    whole = point.step.seconds / longest_s * 100
    work = whole * point.efficiency
    label = f"{point.ranks:,} ranks: {point.efficiency:.0%} of the step computing"
    return (
        f'<svg role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f'<rect width="{whole:.4g}%" height="14" rx="2" class="c-{_WAIT}"/>'
        f'<rect width="{work:.4g}%" height="14" rx="2" class="c-{_WORK}"/></svg>'
    )


def _table(series: Series) -> str:
    rows = [cells(point) for point in series.points]
    homes = "".join(f"<li>{ranks}: {escape(text)}</li>" for ranks, text in _homes(series))
    return (
        f'<div class="card scroll" {_BELOW}>'
        f"{table(list(rows[0]), (list(row.values()) for row in rows), left=())}"
        f'<p class="quiet after">{escape(LEGEND)}</p>'
        f'<p class="after">Homes of the states, by number of ranks</p>'
        f'<ul class="lines">{homes}</ul></div>'
    )


def _homes(series: Series) -> Iterator[tuple[str, str]]:
    """Neighbouring sizes with the same homes together."""
    for homes, points in groupby(series.points, lambda point: homes_text(point.found.plan)):
        ranks = [point.ranks for point in points]
        yield f"{ranks[0]:,}" + (f" to {ranks[-1]:,}" if len(ranks) > 1 else ""), homes


def _collectives(point: Point) -> str:
    kinds = [
        (each.name, f"{each.count:,}", format_bytes(each.nbytes), wording.duration(each.seconds))
        for each in point.totals
    ]
    if not kinds:
        return ""
    heads = ["", "collectives", "bytes of the buffers", "network"]
    return (
        f'<div class="card scroll" {_BELOW}><b>Collectives of one step, {point.ranks:,} ranks</b>'
        f"{table(heads, kinds)}{_sequence(point)}</div>"
    )


def _sequence(point: Point) -> str:
    """The first and the last ones in order."""
    calls = [
        f"{call.name}: {point.found.plan.groups[call.group].name}, {format_bytes(call.nbytes)}, "
        f"{wording.duration(call.seconds)}"
        for call in point.calls
    ]
    left = len(calls) - 2 * _SHOWN
    shown = calls if left <= 0 else [*calls[:_SHOWN], f"... {left} more", *calls[-_SHOWN:]]
    items = "".join(f"<li>{escape(line)}</li>" for line in shown)
    return f'<p class="after">In order</p><ul class="lines">{items}</ul>'
