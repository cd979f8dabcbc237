"""An estimate as a page."""

from __future__ import annotations

from collections.abc import Iterator

from offload.pages.page import Cell, Page, Section, Table
from offload.pages.pictures import Picture, Stretch, bar_picture
from offload.planning.plan.estimate import Estimate, MemoryClass, PlaceEstimate, StepEstimate
from offload.planning.plan.experts import ExpertEstimate
from offload.tools.memest.show import view

_MAX_CAPACITIES = 3.0  # longest bar that is drawn


def estimate_page(estimate: Estimate, *, drawn: bool = True) -> Page:
    """Return a page with everything about an estimate, verdict first; without its pictures, which
    a terminal does not show, if it is not to be `drawn`."""
    return Page(
        name=f"{estimate.model}: memory and time",
        title=estimate.model,
        about=(view.what_text(estimate), view.where_text(estimate)),
        verdict=view.verdict(estimate),
        state=view.state(estimate),
        figures=view.figures(estimate),
        sections=tuple(_sections(estimate, drawn=drawn)),
    )


def _sections(estimate: Estimate, *, drawn: bool) -> Iterator[Section]:
    messages = dict.fromkeys(each.message for each in estimate.shortfalls)
    yield Section("Why not", lines=tuple(messages))
    title = view.changes_title(estimate)
    if estimate.changes:
        yield Section(title, tables=[_changes(estimate)])
    elif not estimate.fits:
        yield Section(title, lines=[view.NO_CHANGE])
    memory = [_memory_picture(estimate)] if drawn else []
    yield Section("Peak memory", memory, [_memory(estimate)])
    for title, step in view.passes_of(estimate):
        pictures = [_timeline(title, step)] if drawn and step.spans else []
        yield Section(title, pictures, [_links(estimate, step)])
    found = estimate.experts
    if found is not None:
        yield Section("Experts", tables=[_experts(found)], lines=view.expert_facts(found))
    plan = estimate.plan
    about = (
        f"{len(plan.groups):,} groups, {plan.prefetch} fetched ahead, chunks of "
        f"{plan.chunk_numel:,} elements"
    )
    homes = Table(("", ""), tuple(view.homes_of(estimate)), left=frozenset({0, 1}))
    yield Section("Where each state lives", tables=[homes], lines=[about])
    yield Section("Notes", lines=tuple(dict.fromkeys(estimate.notes)))


def _changes(estimate: Estimate) -> Table:
    rows = [
        (
            Cell(view.cost_text(change), strong=True),
            Cell(change.text, code=view.settings_of(change)),
        )
        for change in estimate.changes
    ]
    return Table(("step time", "change"), rows, left=frozenset({1}))


def _memory_picture(estimate: Estimate) -> Picture:
    """Draw the peak of each place by class, against its own capacity."""
    places = {view.PLACE_TITLES[tier]: place for tier, place in view.places_of(estimate)}
    said = "; ".join(f"{name} {view.used_text(place)}" for name, place in places.items())
    return bar_picture(
        {name: list(stretches(place)) for name, place in places.items()},
        "{:.0%}".format, label=f"peak memory: {said}", line=1.0,
    )  # fmt: skip


def stretches(place: PlaceEstimate) -> Iterator[Stretch]:
    """Yield the bytes of a place as shares of its capacity, class after class, up to the longest
    bar that is drawn. A place without capacity is drawn full."""
    start, unit = 0.0, place.capacity_nbytes or place.peak_nbytes or 1
    for name in MemoryClass:
        stop = min(_MAX_CAPACITIES, start + place.by_class.get(name, 0) / unit)
        if stop > start:
            yield Stretch(str(name), start, stop)
        start = stop


def _memory(estimate: Estimate) -> Table:
    classes = set(MemoryClass)
    rows = [
        (
            Cell(name, meaning=name if name in classes else "", strong=name == "peak"),
            *(Cell(each, state=_state(name, each), strong=name == "peak") for each in cells),
        )
        for name, cells in view.memory_rows(estimate)
    ]
    return Table(("", *(view.PLACE_TITLES[tier] for tier, _ in view.places_of(estimate))), rows)


def _state(name: str, cell: str) -> str:
    return "bad" if name == "short" and cell != "-" else ""


def _timeline(title: str, step: StepEstimate) -> Picture:
    """Draw the work of each link over time. Work beyond the line at the step's end is left to be
    done during the next step."""
    lanes: dict[str, list[Stretch]] = {link.name: [] for link in step.links}
    for span in step.spans:
        meaning = view.span_meaning(span.link, span.label)
        lanes.setdefault(span.link, []).append(Stretch(meaning, span.start_s, span.stop_s))
    lanes = {name: stretches for name, stretches in lanes.items() if stretches}
    return bar_picture(lanes, view.duration, label=f"{title}: {', '.join(lanes)}",
                       line=step.seconds)  # fmt: skip


def _links(estimate: Estimate, step: StepEstimate) -> Table:
    rows = [
        (Cell(f"{link} (bottleneck)", strong=True) if link == step.bottleneck else link, *cells)
        for link, *cells in view.link_rows(estimate, step)
    ]
    heads = ("link", "busy", *view.token_heads(estimate), view.share_head(estimate), "bytes")
    return Table(heads, rows)


def _experts(found: ExpertEstimate) -> Table:
    rows = [
        [Cell(cell, strong=name == "together") for cell in (name, *cells)]
        for name, *cells in view.expert_rows(found)
    ]
    return Table(view.EXPERT_HEADS, rows)
