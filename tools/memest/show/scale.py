"""The answer of `memest scale`: cells, statements, tables, JSON, and a page or picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.answer import spread_notes
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.estimate.scaling import Point, Series
from offload.tools.memest.hardware.parts import NCCL
from offload.tools.memest.hardware.profiles import LINK_SHARE, MATMUL_SHARE, NETWORK_SHARE
from offload.tools.memest.show import view
from offload.tools.memest.show.bars import Held, capacity_bars, step_bars
from offload.tools.memest.show.render_json import places
from offload.tools.memest.show.sheet import Block, Heading, Lines, Sheet, Table
from offload.tools.memest.show.tables import bullets, ruled
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
    yield from spread_notes(question.case)
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


TABLES = (  # that a terminal of 80 columns has room for: their columns
    (
        "bytes of one rank",
        ("ranks", "shards", "parameters", "gradients", "optimizer", "exchange", "fits"),
    ),
    ("one step", ("ranks", "collectives", "step", "network", "tokens/s", "computing")),
)
_MORE = (("padding",), ("moved / model",))  # columns of a page beside these
_BYTES = (
    "Shards: of one copy of the states, x copies. Bytes are of one rank, at home in all tiers; "
    "exchange: buffers for working with other ranks."
)
_COMPUTING = "Computing: the share of a step in which the model computes."
_LEGENDS = (
    _BYTES,
    f"Moved: buffers of all collectives of a step, in sizes of the model. {_COMPUTING}",
)
_NARROW_LEGEND = (
    f"{_BYTES} {_COMPUTING} Padding, what is moved, homes of the states and the collectives in "
    "order are in --format json and --out scale.html."
)


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


# ---------------------------------------------------------------- tables and JSON
def tables(question: Question, found: Sequence[Series]) -> RenderableType:
    """For a terminal."""
    case = question.case
    parts: list[RenderableType] = [
        Text(f"{case.source.name} on machines like {case.profile.name}, simulated\n")
    ]
    for series in found:
        for what, columns in TABLES:
            table = ruled(*columns, title=f"{series.name}: {what}")
            table.columns[0].justify = "right"
            for point in series.points:
                row = cells(point)
                table.add_row(*(row[name] for name in columns))
            parts += [table, ""]
    return Group(*parts, f"{_NARROW_LEGEND}\n", *bullets(statements(question, found)))


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
        "memory": places(point.found.memory.places),
        "exchange_nbytes": point.shared_nbytes,
        "padding": point.shards.padding,
        "step_s": point.step.seconds,
        "network_s": point.network_s,
        "computing": point.efficiency,
        "tokens_per_s": point.step.tokens_per_s,
        "placements": homes_text(point.found),
        "collectives": [asdict(total) for total in point.totals],
        "sequence": [
            {"name": call.name, "group": call.group, "nbytes": call.nbytes} for call in point.calls
        ],
    }


# ---------------------------------------------------------------- page and picture
_SHOWN = 8  # collectives at the beginning of a step, and at its end


def scale_sheet(question: Question, found: Sequence[Series]) -> Sheet:
    case = question.case
    title = f"{case.source.name}, from one GPU to {found[0].points[-1].ranks:,}"
    blocks = [block for series in found for block in _series(series)]
    return Sheet(
        name=title,
        title=title,
        about=(_workload(question),),
        verdict="simulated: nothing was measured on such a cluster",
        state="",
        blocks=(
            *blocks,
            Heading("What is simulated, and what the numbers are from"),
            Lines(tuple(dict.fromkeys(statements(question, found)))),
        ),
    )


def _workload(question: Question) -> str:
    case = question.case
    work = case.workload
    return (
        f"machines: {case.profile.name} · each rank {work.batch} x {work.sequence:,} tokens, "
        f"{work.passes} to a step · precision {case.config.precision}"
    )


def _series(series: Series) -> Iterator[Block]:
    points = series.points
    yield Heading(series.name)
    yield step_bars(
        "One step, by number of ranks",
        [(f"{p.ranks:,}", p.step.seconds, p.efficiency) for p in points],
    )
    yield from _memory(points)
    for (what, columns), more, legend in zip(TABLES, _MORE, _LEGENDS, strict=True):
        heads = (*columns, *more)
        rows = tuple(tuple(row[name] for name in heads) for row in map(cells, points))
        yield Table(heads, rows, frozenset(), f"{what[0].upper()}{what[1:]}", legend, stacked=True)
    homes = tuple(f"{ranks}: {text}" for ranks, text in _homes(series))
    yield Lines(homes, "Homes of the states, by number of ranks")
    yield from _collectives(points[-1])


def _memory(points: Sequence[Point]) -> Iterator[Block]:
    """Of one rank, place by place."""
    for tier, first in view.places_of(points[0].found):
        there = [(f"{p.ranks:,}", p.found.memory.places[tier]) for p in points]
        held = [Held.of(name, place) for name, place in there]
        title, value = f"{view.PLACE_TITLES[tier]} of one rank", view.used_text
        if len({place.capacity_nbytes for _, place in there}) == 1:
            title, value = f"{title}, {format_bytes(first.capacity_nbytes)}", view.peak_text
        yield capacity_bars(title, held, "each peak against capacity, by ranks", value=value)


def _homes(series: Series) -> Iterator[tuple[str, str]]:
    """Neighbouring sizes with the same homes together."""
    for homes, points in groupby(series.points, lambda point: homes_text(point.found)):
        ranks = [point.ranks for point in points]
        yield f"{ranks[0]:,}" + (f" to {ranks[-1]:,}" if len(ranks) > 1 else ""), homes


def _collectives(point: Point) -> Iterator[Block]:
    kinds = tuple(
        (each.name, f"{each.count:,}", format_bytes(each.nbytes), view.duration(each.seconds))
        for each in point.totals
    )
    if not kinds:
        return
    heads = ("", "collectives", "bytes of the buffers", "network")
    yield Table(heads, kinds, title=f"Collectives of one step, {point.ranks:,} ranks", stacked=True)
    yield Lines(tuple(_sequence(point)), "In order")


def _sequence(point: Point) -> list[str]:
    """The first and the last ones in order."""
    calls = [
        f"{call.name}: {point.found.plan.groups[call.group].name}, {format_bytes(call.nbytes)}, "
        f"{view.duration(call.seconds)}"
        for call in point.calls
    ]
    left = len(calls) - 2 * _SHOWN
    return calls if left <= 0 else [*calls[:_SHOWN], f"... {left:,} more", *calls[-_SHOWN:]]
