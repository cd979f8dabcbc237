"""An estimate as one HTML file: no scripts, nothing fetched, light or dark like the system."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from offload.planning.plan.estimate import Change, Estimate, StepEstimate
from offload.tiers.units import format_bytes
from offload.tools.memest import summary, svg, wording
from offload.tools.memest.html_style import style_sheet
from offload.tools.memest.picture import Bar, bars, labels, lanes


def to_html(estimate: Estimate) -> str:
    """The page. All text of the estimate is escaped."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(estimate.model)}: memory and time</title>"
        f"<style>{style_sheet()}</style></head><body><main>"
        f"{_header(estimate)}{_figures(estimate)}{_why_not(estimate)}{_changes(estimate)}"
        f"{_memory(estimate)}{_time(estimate)}{_homes(estimate)}{_notes(estimate)}"
        "<footer>Bytes in binary units: 1 GiB = 1,073,741,824 bytes. Written by memest.</footer>"
        "</main></body></html>\n"
    )


def _header(estimate: Estimate) -> str:
    state = "good" if estimate.fits else "bad"
    lines = [
        f"{summary.model_text(estimate)} · {summary.state_text(estimate)}",
        f"{estimate.hardware} · {summary.workload_text(estimate)}",
    ]
    paragraphs = "".join(f'<p class="quiet">{escape(line)}</p>' for line in lines)
    return (
        f"<h1>{escape(estimate.model)}</h1>{paragraphs}"
        f'<p class="verdict {state}">{escape(summary.verdict(estimate))}</p>'
    )


def _figures(estimate: Estimate) -> str:
    cards = [
        f'<div class="card"><span class="quiet">{escape(figure.name)}</span>'
        f'<b>{escape(figure.value)}</b><span class="quiet">{escape(figure.aside)}</span></div>'
        for figure in summary.figures(estimate)
    ]
    return f'<div class="figures">{"".join(cards)}</div>'


def _why_not(estimate: Estimate) -> str:
    return _lines("Why not", (s.message for s in estimate.shortfalls))


def _changes(estimate: Estimate) -> str:
    if not estimate.changes:
        return ""
    title = "What would help" if estimate.fits else "What would fit"
    rows = "".join(_change(change) for change in estimate.changes)
    return (
        f'<h2>{title}</h2><div class="card scroll"><table><tr><th class="number">step time</th>'
        f"<th>change</th><th></th></tr>{rows}</table></div>"
    )


def _change(change: Change) -> str:
    factor = change.step_factor
    cost = "unknown" if factor is None else wording.factor_of_time(factor)
    settings = "<br>".join(
        f"<code>{escape(summary.setting_text(key, value))}</code>"
        for key, value in change.settings.items()
    )
    return (
        f'<tr><td class="number">{cost}</td><td>{settings}</td><td>{escape(change.text)}</td></tr>'
    )


def _memory(estimate: Estimate) -> str:
    places = "".join(_place(bar) for bar in bars(estimate.memory))
    return f"<h2>Peak memory, by place and class</h2>{places}"


def _place(bar: Bar) -> str:
    state = "" if bar.fits else ' class="bad"'
    there = f"{format_bytes(bar.peak_nbytes)} of {format_bytes(bar.capacity_nbytes)}"
    share = f" · {wording.share(bar.filled)}" if bar.capacity_nbytes else ""
    keys = "".join(
        f'<li><span class="swatch c-{s.name}"></span>{s.name}'
        f'<span class="value">{format_bytes(s.nbytes)}</span>'
        f'<span class="part">{wording.share(s.nbytes / bar.peak_nbytes)}</span></li>'
        for s in bar.segments
    )
    return (
        f'<div class="card place"><div class="head"><b>{bar.title}</b>'
        f"<span{state}>{there}{share}</span></div>"
        f'{svg.gauge(bar)}{svg.stack(bar)}<ul class="keys">{keys}</ul></div>'
    )


def _time(estimate: Estimate) -> str:
    step = estimate.step
    if step is None:
        return ""
    timeline = _timeline(step) if step.spans else ""
    return (
        f"<h2>One step: {wording.duration(step.seconds)}, bound by {escape(step.bottleneck)}</h2>"
        f'<div class="card">{timeline}{_links(step)}</div>'
    )


def _timeline(step: StepEstimate) -> str:
    rows = "".join(
        f'<span class="name">{escape(lane.link)}</span>{svg.lane(lane, step)}'
        for lane in lanes(step)
    )
    keys = "".join(
        f'<li><span class="swatch s-{index % 6}"></span>{escape(label)}</li>'
        for index, label in enumerate(labels(step))
    )
    return (
        f'<div class="lanes">{rows}<span></span>{svg.axis(step)}</div><ul class="keys">{keys}</ul>'
    )


def _links(step: StepEstimate) -> str:
    rows = "".join(
        f"<tr><td>{escape(link.name)}{' (bottleneck)' if link.name == step.bottleneck else ''}</td>"
        f'<td class="number">{wording.duration(link.seconds)}</td>'
        f'<td class="number">{wording.share(link.seconds / step.seconds)}</td>'
        f'<td class="number">{format_bytes(link.nbytes) if link.nbytes else "-"}</td></tr>'
        for link in step.links
    )
    return (
        '<div class="scroll" style="margin-top:14px"><table><tr><th>link</th>'
        '<th class="number">busy</th><th class="number">share of the step</th>'
        f'<th class="number">bytes</th></tr>{rows}</table></div>'
    )


def _homes(estimate: Estimate) -> str:
    plan = estimate.plan
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(placement.describe())}</td></tr>"
        for name, placement in plan.placements.items()
    )
    rest = f"{len(plan.groups):,} groups, {plan.prefetch} fetched ahead, chunks of "
    return (
        '<h2>Homes of the states</h2><div class="card"><table>'
        f'{rows}</table><p class="quiet after">{rest}{plan.chunk_numel:,} elements</p></div>'
    )


def _notes(estimate: Estimate) -> str:
    return _lines("Notes", estimate.notes)


def _lines(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f'<h2>{title}</h2><div class="card"><ul class="lines">{items}</ul></div>' if items else ""
    )
