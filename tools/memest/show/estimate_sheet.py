"""An estimate as a page."""

from __future__ import annotations

from collections.abc import Iterator

from offload.planning.plan.estimate import Estimate, MemoryClass, StepEstimate
from offload.planning.plan.experts import ExpertEstimate
from offload.tools.memest.show import view
from offload.tools.memest.show.bars import Held, byte_bars, capacity_bars, lanes
from offload.tools.memest.show.sheet import Block, Cell, Figures, Heading, Lines, Sheet, Table


def estimate_sheet(estimate: Estimate) -> Sheet:
    """Return a sheet with everything about an estimate, verdict first."""
    return Sheet(
        name=f"{estimate.model}: memory and time",
        title=estimate.model,
        about=(view.what_text(estimate), view.where_text(estimate)),
        verdict=view.verdict(estimate),
        state=view.state(estimate),
        blocks=tuple(_blocks(estimate)),
    )


def _blocks(estimate: Estimate) -> Iterator[Block]:
    yield Figures(view.figures(estimate))
    if estimate.shortfalls:
        yield Heading("Why not")
        yield Lines(tuple(dict.fromkeys(each.message for each in estimate.shortfalls)))
    if estimate.changes or not estimate.fits:
        yield Heading(view.changes_title(estimate))
        yield _changes(estimate) if estimate.changes else Lines((view.NO_CHANGE,))
    yield Heading("Peak memory")
    yield from _memory(estimate)
    for title, step in view.passes_of(estimate):
        yield Heading(title)
        yield from _time(estimate, step)
    if estimate.experts is not None:
        yield Heading("Experts")
        yield _experts(estimate.experts)
        yield Lines(view.expert_facts(estimate.experts))
    yield Heading("Homes of the states")
    yield _homes(estimate)
    if estimate.notes:
        yield Heading("Notes")
        yield Lines(tuple(dict.fromkeys(estimate.notes)))


def _changes(estimate: Estimate) -> Table:
    rows = tuple(
        (
            Cell(view.cost_text(change), strong=True),
            Cell(change.text, code=view.settings_of(change)),
        )
        for change in estimate.changes
    )
    return Table(("step time", "change"), rows, left=frozenset({1}))


def _memory(estimate: Estimate) -> Iterator[Block]:
    held = [Held.of(view.PLACE_TITLES[t], place) for t, place in view.places_of(estimate)]
    yield capacity_bars("Against capacity", held)
    if len(held) > 1:
        yield byte_bars("On one scale of bytes", held)
    classes = set(MemoryClass)
    rows = tuple(
        (
            Cell(name, meaning=name if name in classes else "", strong=name == "peak"),
            *(Cell(each, state=_state(name, each), strong=name == "peak") for each in cells),
        )
        for name, cells in view.memory_rows(estimate)
    )
    yield Table(("", *(each.name for each in held)), rows)


def _state(name: str, cell: str) -> str:
    return "bad" if name == "short" and cell != "-" else ""


def _time(estimate: Estimate, step: StepEstimate) -> Iterator[Block]:
    if step.spans:
        yield lanes(step)
    rows = tuple(
        (Cell(f"{link} (bottleneck)", strong=True) if link == step.bottleneck else link, *cells)
        for link, *cells in view.link_rows(estimate, step)
    )
    heads = ("link", "busy", *view.token_heads(estimate), view.share_head(estimate), "bytes")
    yield Table(heads, rows)


def _experts(found: ExpertEstimate) -> Table:
    rows = tuple(
        tuple(Cell(cell, strong=name == "together") for cell in (name, *cells))
        for name, *cells in view.expert_rows(found)
    )
    return Table(view.EXPERT_HEADS, rows)


def _homes(estimate: Estimate) -> Table:
    plan = estimate.plan
    rows = tuple(view.homes_of(estimate))
    about = (
        f"{len(plan.groups):,} groups, {plan.prefetch} fetched ahead, chunks of "
        f"{plan.chunk_numel:,} elements"
    )
    return Table(("", ""), rows, left=frozenset({0, 1}), about=about)
