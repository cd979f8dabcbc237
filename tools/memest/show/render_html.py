"""An estimate as one HTML file."""

from __future__ import annotations

from html import escape

from offload.pages.html_page import key, lines, page, table
from offload.planning.plan.estimate import Change, Estimate, StepEstimate
from offload.tiers.units import format_bytes
from offload.tools.memest.show import svg, view
from offload.tools.memest.show.view import Bar, bars, lanes, span_colours


def to_html(estimate: Estimate) -> str:
    """The page. All text of the estimate is escaped."""
    body = (
        f"{_header(estimate)}{_figures(estimate)}"
        f"{lines('Why not', (s.message for s in estimate.shortfalls))}{_changes(estimate)}"
        f"{_memory(estimate)}{_time(estimate)}{_homes(estimate)}{lines('Notes', estimate.notes)}"
    )
    return page(f"{estimate.model}: memory and time", body, by="memest")


def _header(estimate: Estimate) -> str:
    state = "good" if estimate.fits else "bad"
    texts = view.what_text(estimate), view.where_text(estimate)
    paragraphs = "".join(f'<p class="quiet">{escape(text)}</p>' for text in texts)
    return (
        f"<h1>{escape(estimate.model)}</h1>{paragraphs}"
        f'<p class="verdict {state}">{escape(view.verdict(estimate))}</p>'
    )


def _figures(estimate: Estimate) -> str:
    cards = [
        f'<div class="card"><span class="quiet">{escape(figure.name)}</span>'
        f'<b>{escape(figure.value)}</b><span class="quiet">{escape(figure.aside)}</span></div>'
        for figure in view.figures(estimate)
    ]
    return f'<div class="figures">{"".join(cards)}</div>'


def _changes(estimate: Estimate) -> str:
    if not estimate.changes:
        return ""
    title = "What would help" if estimate.fits else "What would fit"
    rows = table(["step time", "change", ""], map(_change, estimate.changes), left=(1, 2))
    return f'<h2>{title}</h2><div class="card scroll">{rows}</div>'


def _change(change: Change) -> tuple[str, str, str]:
    factor = change.step_factor
    settings = "<br>".join(
        f"<code>{escape(view.setting_text(key, value))}</code>"
        for key, value in change.settings.items()
    )
    cost = "unknown" if factor is None else view.factor_of_time(factor)
    return cost, settings, escape(change.text)


def _memory(estimate: Estimate) -> str:
    places = "".join(_place(bar) for bar in bars(estimate.memory))
    return f"<h2>Peak memory, by place and class</h2>{places}"


def _place(bar: Bar) -> str:
    state = "" if bar.fits else ' class="bad"'
    keys = key(
        (piece.colour, f'{piece.label}<span class="value">{piece.value}</span>'
         f'<span class="part">{piece.share}</span>')
        for piece in bar.pieces
    )  # fmt: skip
    return (
        f'<div class="card place"><div class="head"><b>{bar.title}</b>'
        f"<span{state}>{view.used_text(bar)}</span></div>{svg.gauge(bar)}{svg.stack(bar)}{keys}"
        "</div>"
    )


def _time(estimate: Estimate) -> str:
    step = estimate.step
    if step is None:
        return ""
    timeline = _timeline(step) if step.spans else ""
    return (
        f'<h2>{escape(view.step_text(step))}</h2><div class="card">{timeline}{_links(step)}</div>'
    )


def _timeline(step: StepEstimate) -> str:
    rows = "".join(
        f'<span class="name">{escape(lane.link)}</span>{svg.lane(lane)}' for lane in lanes(step)
    )
    keys = key((colour, escape(label)) for label, colour in span_colours(step).items())
    return f'<div class="lanes">{rows}<span></span>{svg.axis(step)}</div>{keys}'


def _links(step: StepEstimate) -> str:
    rows = (
        (
            f"{escape(link.name)}{' (bottleneck)' if link.name == step.bottleneck else ''}",
            view.duration(link.seconds), view.share(link.seconds / step.seconds),
            format_bytes(link.nbytes) if link.nbytes else "-",
        )
        for link in step.links
    )  # fmt: skip
    heads = ["link", "busy", "share of the step", "bytes"]
    return f'<div class="scroll" style="margin-top:14px">{table(heads, rows)}</div>'


def _homes(estimate: Estimate) -> str:
    plan = estimate.plan
    rows = ((name, escape(each.describe())) for name, each in plan.placements.items())
    return (
        f'<h2>Homes of the states</h2><div class="card">{table((), rows, left=(0, 1))}'
        f'<p class="quiet after">{len(plan.groups):,} groups, {plan.prefetch} fetched ahead, '
        f"chunks of {plan.chunk_numel:,} elements</p></div>"
    )
