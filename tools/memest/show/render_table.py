"""An estimate as tables for a terminal, 80 columns or wider."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload.display.console import Prose
from offload.pages.colours import DARK
from offload.planning.plan.estimate import Estimate, MemoryClass, PlaceEstimate, StepEstimate
from offload.planning.plan.experts import ExpertEstimate
from offload.tools.memest.show import view
from offload.tools.memest.show.tables import bullets, plain, ruled

_BAR_CELLS = 16
_NAME_CELLS = max(len(name) for name in MemoryClass)
_GAUGE_CELLS = 9  # three of them and their shares fit into 80 columns


def to_table(estimate: Estimate) -> RenderableType:
    """Return everything about an estimate as tables, verdict first."""
    return Group(*_parts(estimate))


def _parts(estimate: Estimate) -> Iterator[RenderableType]:
    yield _verdict(estimate)
    if view.has_drawbacks(estimate) and estimate.changes:
        yield from _changes(estimate)
        yield ""
    yield _headline(estimate)
    yield ""
    yield _memory(estimate)
    for title, step in view.passes_of(estimate):
        yield ""
        yield _time(estimate, title, step)
    yield ""
    yield _figures(estimate)
    if estimate.experts is not None:
        yield ""
        yield _experts(estimate.experts)
        yield from bullets(view.expert_facts(estimate.experts), indent="  ")
    if estimate.shortfalls:
        yield from _list("why not", (s.message for s in estimate.shortfalls))
    if estimate.changes and not view.has_drawbacks(estimate):
        yield from _changes(estimate)
    elif not estimate.fits:
        yield from _list(view.changes_title(estimate).lower(), [view.NO_CHANGE])
    if estimate.notes:
        yield from _list("notes", estimate.notes)


def _verdict(estimate: Estimate) -> Text:
    colour = {"good": "green", "bad": "red"}.get(view.state(estimate), "yellow")
    return Text(view.verdict(estimate), style=f"bold {colour}")


def _headline(estimate: Estimate) -> Table:
    table = plain({"style": "dim", "no_wrap": True}, {"overflow": "fold"})
    table.add_row("model", Text(view.model_text(estimate, estimate.model)))
    table.add_row("hardware", Text(estimate.hardware))
    table.add_row("work", view.workload_text(estimate))
    table.add_row("states", view.state_text(estimate))
    table.add_row("homes", view.homes_text(estimate))
    return table


def _memory(estimate: Estimate) -> Table:
    places = view.places_of(estimate)
    table = ruled("", *(view.PLACE_TITLES[tier] for tier, _ in places), title="Peak memory")
    table.columns[0].min_width = _NAME_CELLS + 2
    red = {"peak": "bold" if estimate.fits else "bold red", "short": "bold red"}
    classes = set(MemoryClass)
    for name, cells in view.memory_rows(estimate):
        if name == "peak":
            table.add_section()
        spot = _swatch(name) if name in classes else Text()
        table.add_row(spot.append(name), *(Text(cell, style=red.get(name, "")) for cell in cells))
    table.add_row("", *(_gauge(place) for _, place in places))
    return table


def _swatch(meaning: str) -> Text:
    return Text.assemble(("■ ", DARK[meaning]))


def _gauge(place: PlaceEstimate) -> Text:
    """Return a gauge of the used capacity, by class."""
    stops = list(accumulate(place.by_class.get(name, 0) for name in MemoryClass))
    text = Text()
    for cell in range(_GAUGE_CELLS):
        at = (cell + 0.5) / _GAUGE_CELLS * (place.capacity_nbytes or place.peak_nbytes)
        there = next((name for name, stop in zip(MemoryClass, stops, strict=True) if at < stop), "")
        text.append("█" if there else "░", style=DARK[there] if there else "dim")
    used = view.share(view.filled(place)) if place.capacity_nbytes else ""
    is_short = place.peak_nbytes > place.capacity_nbytes
    return text.append(f" {used:>6}", style="red" if is_short else "")


def _time(estimate: Estimate, title: str, step: StepEstimate) -> Table:
    share = view.share_head(estimate)
    table = ruled(
        "link", "busy", *view.token_heads(estimate), "bytes", share, title=title, left=[share]
    )
    table.columns[0].min_width = _NAME_CELLS + 2
    links = view.links_of(estimate, step)
    for link, (name, busy, *tokens, used, nbytes) in zip(
        links, view.link_rows(estimate, step), strict=True
    ):
        part = link.seconds / step.seconds if step.seconds else 0.0
        cells = min(_BAR_CELLS, round(part * _BAR_CELLS))
        bar = Text("█" * cells, style=DARK[view.span_meaning(name, "")])
        bar.append("░" * (_BAR_CELLS - cells), style="dim").append(f" {used:>6}", style="default")
        style = "bold" if name == step.bottleneck else ""
        table.add_row(
            _swatch(view.span_meaning(name, "")).append(name, style), busy, *tokens, nbytes, bar
        )
    return table


def _experts(found: ExpertEstimate) -> Table:
    name, *bytes_of = view.EXPERT_HEADS
    table = ruled(name, *bytes_of, title="Experts")
    for cells in view.expert_rows(found):
        table.add_row(*cells, style="bold" if cells[0] == "together" else "")
    return table


def _figures(estimate: Estimate) -> Table:
    table = plain({"style": "dim", "no_wrap": True}, {"justify": "right", "no_wrap": True}, {})
    for figure in view.figures(estimate):
        if figure.name not in ("step", "prefill", "decoding"):  # titles of the tables above
            table.add_row(figure.name, figure.value, figure.aside)
    return table


def _changes(estimate: Estimate) -> Iterator[RenderableType]:
    yield ""
    yield Text(view.changes_title(estimate).lower(), style="bold")
    costs = [view.cost_text(change) for change in estimate.changes]
    indent = " " * (width := max(map(len, costs)) + 4)
    for change, cost in zip(estimate.changes, costs, strict=True):
        first = f"{cost:>{width - 2}}  "
        if settings := " ".join(view.settings_of(change)):
            yield Prose(settings, first=first, command=True)
        yield Prose(change.text, first=indent if settings else first)


def _list(title: str, lines: Iterable[str]) -> Iterator[RenderableType]:
    yield ""
    yield Text(title, style="bold")
    yield from bullets(lines, indent="  ")
