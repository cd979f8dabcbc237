"""The answer of `memest scale`: cells, statements, tables, JSON, and one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby
from typing import Any

from rich.text import Text

from offload.pages.colours import SPANS
from offload.pages.html_page import key, lines, page, table
from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.estimate.scaling import Point, Series
from offload.tools.memest.hardware.parts import NCCL
from offload.tools.memest.hardware.profiles import LINK_SHARE, MATMUL_SHARE, NETWORK_SHARE
from offload.tools.memest.show import view
from offload.tools.memest.show.tables import bullets, ruled, show
from offload.tools.memest.show.view import homes_text

STATES = (StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER)


def statements(question: Question, found: Sequence[Series]) -> Iterator[str]:
    """What of the numbers is computed, what is from data sheets, and what is assumed."""
    profile = question.case.profile
    inside = profile.inside or profile.link
    yield (
        "Simulated: nothing was run or measured on such a cluster. The layouts, the plan and the "
        "order of collectives are those of the code that trains; times are a model"
    )
    parts = sum(point.shards.parts for series in found for point in series.points)
    yield (
        "Computed: bytes of every class, from the layouts; every shard of every rank follows the "
        f"one before it, and together they are the whole ({parts:,} parts of parameters checked)"
    )
    yield f"From data sheets: {'; '.join(profile.notes)}"
    if inside is not None:
        yield f"From data sheets: {inside.name}, {inside.source}"
    yield (
        f"Assumed: products at {MATMUL_SHARE:.0%} of their peak, links between ranks at "
        f"{NETWORK_SHARE:.0%} of theirs, those to the host at {LINK_SHARE:.0%}; a network that "
        "carries what all machines send; no rank is slower than another"
    )
    yield f"Latencies: {NCCL.source}"
    yield (
        "All-gathers are rings. A reduce-scatter is an all-to-all and a sum in the order of the "
        "ranks, as the runtime makes it: the same bits for any number of ranks, and more bytes "
        "between machines than a ring, which sums within a machine first"
    )
    yield "The batch is per rank: with more ranks a step has more tokens (weak scaling)"
    yield from question.assumed


def cells(point: Point) -> dict[str, str]:
    """One row by its columns."""
    sharding = point.sharding
    held = {str(state): _bytes(point.held_nbytes(state)) for state in STATES}
    return {
        "ranks": f"{point.ranks:,}",
        "shards": f"{sharding.ranks:,} x {sharding.replicas:,}",
        **held,
        "exchange": _bytes(point.shared_nbytes),
        "padding": f"{point.shards.padding:.1%}",
        "collectives": f"{len(point.calls):,}",
        "moved / model": f"{point.times_model:.2f}",
        "step": view.duration(point.step.seconds),
        "network": view.duration(point.network_s) if point.network_s else "-",
        "tokens/s": f"{point.step.tokens_per_s:,.0f}",
        "computing": f"{point.efficiency:.0%}",
        "fits": "yes" if point.found.fits else "no",
    }


NARROW = (  # tables that a terminal of 80 columns has room for: their columns
    (
        "bytes of one rank",
        ("ranks", "shards", "parameters", "gradients", "optimizer", "exchange", "fits"),
    ),
    ("one step", ("ranks", "collectives", "step", "network", "tokens/s", "computing")),
)
_BYTES = (
    "Shards: of one copy of the states, x copies. Bytes are of one rank, at home in all tiers; "
    "exchange: buffers for working with other ranks."
)
_COMPUTING = "Computing: the share of a step in which the model computes."
LEGEND = (
    f"{_BYTES} Moved: buffers of all collectives of a step, in sizes of the model. {_COMPUTING}"
)
NARROW_LEGEND = (
    f"{_BYTES} {_COMPUTING} Padding, what is moved, homes of the states and the collectives in "
    "order are in --format json and --out scale.html."
)


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


# ---------------------------------------------------------------- table and JSON
def print_tables(question: Question, found: Sequence[Series]) -> None:
    case = question.case
    show(Text(f"{case.source.name} on machines like {case.profile.name}, simulated\n"))
    for series in found:
        for what, columns in NARROW:
            table = ruled(*columns, title=f"{series.name}: {what}")
            table.columns[0].justify = "right"
            for point in series.points:
                row = cells(point)
                table.add_row(*(row[name] for name in columns))
            show(table, "")
    show(f"{NARROW_LEGEND}\n", bullets(statements(question, found)))


def to_values(question: Question, found: Sequence[Series]) -> dict[str, Any]:
    return {
        "schema": "memest-scale/1",
        "model": question.case.source.name,
        "machine": question.case.profile.name,
        "series": [
            {"name": series.name, "points": [_point_values(point) for point in series.points]}
            for series in found
        ],
        "notes": list(statements(question, found)),
    }


def _point_values(point: Point) -> dict[str, Any]:
    sharding = point.sharding
    return {
        "ranks": point.ranks,
        "shards": sharding.ranks,
        "replicas": sharding.replicas,
        "fits": point.found.fits,
        "by_class": {str(state): point.held_nbytes(state) for state in STATES},
        "exchange_nbytes": point.shared_nbytes,
        "padding": point.shards.padding,
        "step_s": point.step.seconds,
        "network_s": point.network_s,
        "computing": point.efficiency,
        "tokens_per_s": point.step.tokens_per_s,
        "placements": homes_text(point.found.plan),
        "collectives": [asdict(total) for total in point.totals],
        "sequence": [
            {"name": call.name, "group": call.group, "nbytes": call.nbytes} for call in point.calls
        ],
    }


# ---------------------------------------------------------------- HTML


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
    return page(title, body, by="memest", wide=True)


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
        (f"{point.ranks:,}", view.duration(point.step.seconds), _bar(point, longest_s))
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
        (each.name, f"{each.count:,}", format_bytes(each.nbytes), view.duration(each.seconds))
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
        f"{view.duration(call.seconds)}"
        for call in point.calls
    ]
    left = len(calls) - 2 * _SHOWN
    shown = calls if left <= 0 else [*calls[:_SHOWN], f"... {left} more", *calls[-_SHOWN:]]
    items = "".join(f"<li>{escape(line)}</li>" for line in shown)
    return f'<p class="after">In order</p><ul class="lines">{items}</ul>'
