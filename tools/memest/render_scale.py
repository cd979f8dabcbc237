"""The answer of `memest scale` as one HTML file: no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from offload.tiers.units import format_bytes
from offload.tools.memest import wording
from offload.tools.memest.html_style import style_sheet
from offload.tools.memest.run_estimate import Question
from offload.tools.memest.scale_wording import HEADER, LEGEND, cells, statements
from offload.tools.memest.scaling import Point, Series, in_order, seconds_of, totals

_SHOWN = 8  # collectives at the beginning of a step, and at its end
_EXTRA = (
    ".wide{max-width:1240px}.wide td,.wide th{padding-right:9px;font-size:13px}"
    ".bars td{border-bottom:0;padding:2px 14px 2px 0}.bars svg{height:16px}"
)


def to_html(question: Question, found: Sequence[Series]) -> str:
    """The page. All text is escaped."""
    case = question.case
    title = f"{case.source.name}, from one GPU to {found[0].points[-1].ranks:,}"
    longest_s = max(point.step.seconds for series in found for point in series.points)
    body = "".join(_series(series, longest_s) for series in found)
    said = "".join(f"<li>{escape(line)}</li>" for line in statements(question, found))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}{_EXTRA}</style></head>"
        f'<body><main class="wide"><h1>{escape(title)}</h1>'
        f'<p class="quiet">{escape(_workload(question))}</p>'
        '<p class="verdict">simulated: nothing was measured on such a cluster</p>'
        f'{body}<h2>What is simulated, and what the numbers are from</h2><div class="card">'
        f'<ul class="lines">{said}</ul></div>'
        "<footer>Bytes in binary units: 1 GiB = 1,073,741,824 bytes. Written by memest.</footer>"
        "</main></body></html>\n"
    )


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
    rows = "".join(
        f'<tr><td class="number">{point.ranks:,}</td>'
        f'<td class="number">{wording.duration(point.step.seconds)}</td>'
        f'<td style="width:100%">{_bar(point, longest_s)}</td></tr>'
        for point in series.points
    )
    keys = (
        '<ul class="keys"><li><span class="swatch s-0"></span>the model computes</li>'
        '<li><span class="swatch s-3"></span>it waits</li></ul>'
    )
    return (
        '<div class="card"><b>One step, by number of ranks</b>'
        f'<table class="bars"><tr><th class="number">ranks</th><th class="number">step</th>'
        f"<th></th></tr>{rows}</table>{keys}</div>"
    )


def _bar(point: Point, longest_s: float) -> str:
    """As long as the step against the longest of the page."""
    whole = point.step.seconds / longest_s * 100
    work = whole * point.efficiency
    label = f"{point.ranks:,} ranks: {point.efficiency:.0%} of the step computing"
    return (
        f'<svg role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f'<rect width="{whole:.4g}%" height="14" rx="2" class="s-3"/>'
        f'<rect width="{work:.4g}%" height="14" rx="2" class="s-0"/></svg>'
    )


def _table(series: Series) -> str:
    heads = "".join(f'<th class="number">{escape(name)}</th>' for name in HEADER)
    rows = "".join(
        "<tr>" + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells(point))
        + "</tr>"
        for point in series.points
    )  # fmt: skip
    homes = "".join(
        f"<li>{ranks}: {escape(text)}</li>" for ranks, text in _homes(series)
    )  # fmt: skip
    return (
        f'<div class="card scroll" style="margin-top:12px"><table><tr>{heads}</tr>{rows}</table>'
        f'<p class="quiet after">{escape(LEGEND)}</p>'
        f'<p class="after">Homes of the states, by number of ranks</p>'
        f'<ul class="lines">{homes}</ul></div>'
    )


def _homes(series: Series) -> Iterator[tuple[str, str]]:
    """Neighbouring sizes with the same homes together."""
    begun: list[tuple[int, int, str]] = []
    for point in series.points:
        if begun and begun[-1][2] == point.homes:
            begun[-1] = (begun[-1][0], point.ranks, point.homes)
        else:
            begun.append((point.ranks, point.ranks, point.homes))
    for first, last, homes in begun:
        yield (f"{first:,}" if first == last else f"{first:,} to {last:,}"), homes


def _collectives(point: Point) -> str:
    kinds = "".join(
        f'<tr><td>{escape(each.name)}</td><td class="number">{each.count:,}</td>'
        f'<td class="number">{format_bytes(each.nbytes)}</td>'
        f'<td class="number">{wording.duration(each.seconds)}</td></tr>'
        for each in totals(point)
    )
    if not kinds:
        return ""
    return (
        f'<div class="card scroll" style="margin-top:12px"><b>Collectives of one step, '
        f"{point.ranks:,} ranks</b><table><tr><th></th>"
        f'<th class="number">collectives</th><th class="number">bytes of the buffers</th>'
        f'<th class="number">network</th></tr>{kinds}</table>{_sequence(point)}</div>'
    )


def _sequence(point: Point) -> str:
    """The first and the last ones in order."""
    network = point.profile.network()
    assert network is not None, "there are times"
    lines = [
        f"{name}: {point.verdict.plan.groups[each.group].name}, {format_bytes(each.nbytes)}, "
        f"{wording.duration(seconds_of(network, each, point.sharding))}"
        for name, each in in_order(point.sequence)
    ]
    left = len(lines) - 2 * _SHOWN
    shown = lines if left <= 0 else [*lines[:_SHOWN], f"... {left} more", *lines[-_SHOWN:]]
    items = "".join(f"<li>{escape(line)}</li>" for line in shown)
    return f'<p class="after">In order</p><ul class="lines">{items}</ul>'
