"""An estimate as tables for a terminal, 80 columns or wider."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offload.planning.plan.estimate import Estimate, MemoryClass, StepEstimate
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show import view
from offload.tools.memest.show.tables import bullets, plain, ruled
from offload.tools.memest.show.view import Bar, bars

_BAR_CELLS = 16
_NAME_CELLS = max(len(name) for name in MemoryClass)
_GAUGE_CELLS = 9  # three of them and their shares fit into 80 columns


def to_table(estimate: Estimate) -> RenderableType:
    """Everything there is to say, verdict first."""
    return Group(*_parts(estimate))


def _parts(estimate: Estimate) -> Iterator[RenderableType]:
    yield _verdict(estimate)
    yield _headline(estimate)
    yield ""
    yield _memory(estimate)
    if estimate.step is not None:
        yield ""
        yield _time(estimate.step)
    yield ""
    yield _figures(estimate)
    if estimate.shortfalls:
        yield from _list("why not", (s.message for s in estimate.shortfalls))
    if estimate.changes:
        yield from _changes(estimate)
    if estimate.notes:
        yield from _list("notes", estimate.notes)


def _verdict(estimate: Estimate) -> Text:
    style = "bold green" if estimate.fits else "bold red"
    return Text(view.verdict(estimate), style=style)


def _headline(estimate: Estimate) -> Table:
    table = plain({"style": "dim", "no_wrap": True}, {"overflow": "fold"})
    table.add_row("model", Text(view.model_text(estimate, estimate.model)))
    table.add_row("hardware", Text(estimate.hardware))
    table.add_row("work", view.workload_text(estimate))
    table.add_row("states", view.state_text(estimate))
    table.add_row("homes", view.homes_text(estimate.plan))
    return table


def _memory(estimate: Estimate) -> Table:
    shown = bars(estimate.memory)
    table = ruled("", *(bar.title for bar in shown), title="Peak memory")
    table.columns[0].min_width = _NAME_CELLS
    for name in MemoryClass:
        cells = [_held(bar, name) for bar in shown]
        if any(cells):
            table.add_row(str(name), *(cell or "-" for cell in cells))
    table.add_section()
    table.add_row("peak", *(_peak(bar) for bar in shown))
    table.add_row("capacity", *(format_bytes(bar.capacity_nbytes) for bar in shown))
    if not all(bar.fits for bar in shown):
        table.add_row("short", *(_short(bar) for bar in shown))
    if estimate.system_nbytes:
        kept = {Tier.HOST: format_bytes(estimate.system_nbytes)}
        table.add_row("for the system", *(kept.get(bar.tier, "-") for bar in shown))
    table.add_row("budget", *(format_bytes(estimate.plan.budgets[bar.tier]) for bar in shown))
    table.add_row("", *(_gauge(bar) for bar in shown))
    return table


def _held(bar: Bar, name: MemoryClass) -> str:
    return next((piece.value for piece in bar.pieces if piece.label == name), "")


def _peak(bar: Bar) -> Text:
    return Text(format_bytes(bar.peak_nbytes), style="bold" if bar.fits else "bold red")


def _short(bar: Bar) -> Text:
    """By how much, also where peak and capacity are rounded to the same figure."""
    missing = bar.peak_nbytes - bar.capacity_nbytes
    return Text(format_bytes(missing), style="bold red") if missing > 0 else Text("-")


def _gauge(bar: Bar) -> Text:
    used = view.share(bar.filled) if bar.capacity_nbytes else ""
    filled = min(_GAUGE_CELLS, round(bar.filled * _GAUGE_CELLS)) if bar.capacity_nbytes else 0
    text = Text("█" * filled, style="green" if bar.fits else "red")
    text.append("░" * (_GAUGE_CELLS - filled), style="dim")
    return text.append(f" {used:>6}", style="" if bar.fits else "red")


def _time(step: StepEstimate) -> Table:
    share = "share of the step"
    table = ruled("link", "busy", "bytes", share, title=view.step_text(step), left=[share])
    table.columns[0].min_width = _NAME_CELLS
    for link in step.links:
        busy = link.seconds / step.seconds if step.seconds else 0.0
        cells = min(_BAR_CELLS, round(busy * _BAR_CELLS))
        bar = Text("█" * cells, style="yellow" if link.name == step.bottleneck else "blue")
        bar.append("░" * (_BAR_CELLS - cells), style="dim").append(f" {view.share(busy):>6}")
        nbytes = format_bytes(link.nbytes) if link.nbytes else "-"
        table.add_row(link.name, view.duration(link.seconds), nbytes, bar)
    return table


def _figures(estimate: Estimate) -> Table:
    table = plain({"style": "dim", "no_wrap": True}, {"justify": "right", "no_wrap": True}, {})
    for figure in view.figures(estimate):
        if figure.name != "step":  # the title of the table above
            table.add_row(figure.name, figure.value, figure.aside)
    return table


def _changes(estimate: Estimate) -> Iterator[RenderableType]:
    yield ""
    yield Text("what would fit" if not estimate.fits else "what would help", style="bold")
    table = plain({"justify": "right", "style": "bold", "no_wrap": True}, {"overflow": "fold"})
    for change in estimate.changes:
        factor = change.step_factor
        cost = "?" if factor is None else view.factor_of_time(factor)
        settings = [view.setting_text(k, v) for k, v in change.settings.items()]
        text = Text(" ".join(settings), style="cyan")
        text.append(f"\n{change.text}" if settings else change.text, style="default")
        table.add_row(cost, text)
    yield Padding(table, (0, 0, 0, 2))


def _list(title: str, lines: Iterable[str]) -> Iterator[RenderableType]:
    yield ""
    yield Text(title, style="bold")
    yield Padding(bullets(lines), (0, 0, 0, 2))
