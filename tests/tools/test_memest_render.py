"""What an estimate is shown as: nothing overlaps, nothing is lost, nothing is fetched or run."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from offload.pages.colours import DARK, LIGHT, Theme, ink_on
from offload.pages.ticks import ticks
from offload.planning.plan.estimate import (
    Estimate,
    LinkTime,
    MemoryClass,
    MemoryEstimate,
    PlaceEstimate,
    Shortfall,
    Span,
    StepEstimate,
)
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show import view
from offload.tools.memest.show.render_html import to_html
from offload.tools.memest.show.render_json import SCHEMA, to_json
from offload.tools.memest.show.render_png import draw, to_png
from offload.tools.memest.show.render_table import to_table
from offload.tools.memest.show.view import (
    LEAST_WIDTH,
    bars,
    lanes,
    span_colours,
    step_length,
)
from tests.tools.estimates import GiB, estimate, memory

CASES = {
    "fits": estimate(),
    "does not": estimate(gpu=True, fits=False),
    "tiny": estimate(gpu=True, scale=1e-6),
    "huge": estimate(gpu=True, scale=1e4),
    "no times": estimate(step=None),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def held(*nbytes: int, capacity: int = 24 * GiB) -> Estimate:
    place = PlaceEstimate(capacity, dict(zip(MemoryClass, nbytes, strict=False)))
    places = {Tier.DEVICE: place}
    return estimate(memory=MemoryEstimate(places, {Tier.DEVICE: sum(nbytes)}, 0))


def text_of(case: Estimate, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(to_table(case))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


# ---------------------------------------------------------------- bars and lanes
sizes = st.lists(st.integers(0, 1 << 50), min_size=1, max_size=len(MemoryClass)).filter(any)


@settings(deadline=None)
@given(sizes, st.integers(0, 1 << 45))
def test_segments_touch_and_none_is_too_thin_to_see(nbytes: list[int], capacity: int) -> None:
    (bar,) = bars(held(*nbytes, capacity=capacity).memory)
    assert sum(nbytes) == bar.peak_nbytes
    assert [s.value for s in bar.pieces] == [format_bytes(n) for n in nbytes if n > 0]
    assert len(bar.pieces) == sum(n > 0 for n in nbytes)
    edges = [0.0, *(s.stop for s in bar.pieces)]
    assert [s.start for s in bar.pieces] == edges[:-1]
    assert edges[-1] == pytest.approx(1.0)
    assert all(s.stop - s.start >= LEAST_WIDTH * 0.999 for s in bar.pieces)
    assert max(bar.gauge_peak, bar.gauge_capacity) == 1.0
    assert bar.fits is (sum(nbytes) <= capacity)


def test_widths_follow_bytes_where_all_can_be_seen() -> None:
    (bar,) = bars(held(6 * GiB, 2 * GiB).memory)
    assert [s.stop for s in bar.pieces] == pytest.approx([0.75, 1.0])


@settings(deadline=None)
@given(st.floats(1e-6, 1e10))
def test_ticks_are_few_round_and_inside(length: float) -> None:
    marks = ticks(length)
    assert 2 <= len(marks) <= 9
    assert marks[0].text == "0"
    assert all(0 <= mark.at <= 1 for mark in marks)
    assert all(b.at > a.at for a, b in pairwise(marks))
    assert all(re.fullmatch(r"[\d,.]+ \S+", mark.text) for mark in marks[1:])
    assert max(len(mark.text) for mark in marks) <= 13


def test_ticks_of_hours_are_hours() -> None:
    assert [mark.text for mark in ticks(25.5 * 3600)] == [
        "0",
        "5 h",
        "10 h",
        "15 h",
        "20 h",
        "25 h",
    ]
    assert [mark.text for mark in ticks(75.0)] == ["0", "15 s", "30 s", "45 s", "60 s", "75 s"]


def test_lanes_keep_the_order_of_links_and_spans() -> None:
    step = CASES["fits"].step
    assert step is not None
    assert [lane.link for lane in lanes(step)] == [
        "compute",
        "optimizer",
        "nvme read",
        "nvme write",
    ]
    assert list(span_colours(step))[:2] == ["forward", "fetch parameters"]
    assert step_length(step) == 92.0


def test_a_span_that_outlasts_the_step_stays_on_the_axis() -> None:
    step = StepEstimate(1.0, (LinkTime("compute", 1.0),), "compute", 1,
                        (Span("compute", "forward", 0.0, 1.5),))  # fmt: skip
    assert lanes(step)[0].pieces[0].stop == 1.0


# ---------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (1.2e-5, "12.0 µs"), (0.0123, "12.3 ms"), (0.9999, "1.00 s"), (1.234, "1.23 s"),
     (119.0, "119 s"), (125.0, "2 min 5 s"), (7200.0, "2 h"), (12345.0, "3 h 26 min"),
     (1.08e6, "12.5 days"), (1e9, "31.7 years"), (float("inf"), "unknown")],
)  # fmt: skip
def test_durations(value: float, text: str) -> None:
    assert view.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(512, "512"), (2941, "2,941"), (124e6, "124 M"), (6.738e9, "6.74 B"), (999.9e9, "1.00 T"),
     (30.2e12, "30.2 T"), (5e15, "5,000 T")],
)  # fmt: skip
def test_counts(value: float, text: str) -> None:
    assert view.counted(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 %"), (1e-9, "<0.1 %"), (0.004, "0.4 %"), (0.37, "37 %"), (0.9999, ">99 %"),
     (1.0, "100 %"), (5.5, "550 %"), (590.0, "x 590")],
)  # fmt: skip
def test_what_is_there_is_never_shown_as_nothing(value: float, text: str) -> None:
    assert view.share(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.001, "±0 %"), (1.42, "+42 %"), (0.84, "-16 %"), (3.4, "x 3.40")]
)
def test_costs_in_time(value: float, text: str) -> None:
    assert view.factor_of_time(value) == text


@settings(deadline=None)
@given(st.floats(0, 1e18))
def test_words_are_short_for_every_number(value: float) -> None:
    for word in (view.duration, view.counted, view.per_second, view.share):
        assert 1 <= len(word(value)) <= 28


# ---------------------------------------------------------------- table
@every_case
@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_keeps_every_number_at_any_width(case: Estimate, width: int) -> None:
    text = text_of(case, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for name in MemoryClass:
        held = any(place.by_class.get(name, 0) for place in case.memory.places.values())
        assert (f"{name} " in text) is held
    if case.step is not None:
        assert f"bound by {case.step.bottleneck}" in text


def test_the_table_says_what_is_short_and_what_each_change_costs() -> None:
    text = text_of(CASES["does not"], 80)
    assert text.startswith("does not fit: RAM is 32.0 GiB short")
    assert "+42 %  -o placement.optimizer=nvme" in text
    assert "--ram 96GiB" in text
    assert "-16 %  -o optimizer.states=int8 -o micro_batches=4" in text


def test_the_table_says_by_how_much_where_two_figures_look_alike() -> None:
    full = PlaceEstimate(4 << 30, {MemoryClass.STAGING: (4 << 30) + (3 << 20)})
    memory = replace(CASES["fits"].memory, places={Tier.HOST: full})
    case = replace(CASES["fits"], memory=memory, system_nbytes=2 << 30)
    rows = [line.split() for line in text_of(case, 80).splitlines()]
    assert ["peak", "4.0", "GiB"] in rows
    assert ["capacity", "4.0", "GiB"] in rows
    assert ["short", "3.0", "MiB"] in rows
    assert ["for", "the", "system", "2.0", "GiB"] in rows
    assert any(row[:1] == ["budget"] for row in rows)


def test_names_are_not_markup() -> None:
    text = text_of(replace(CASES["fits"], model="[bold]x[/bold]", notes=("[red]y",)), 80)
    assert "[bold]x[/bold]" in text
    assert "[red]y" in text


# ---------------------------------------------------------------- JSON
@every_case
def test_json_has_the_documented_fields(case: Estimate) -> None:
    value = json.loads(to_json(case))
    assert value["schema"] == SCHEMA == "memest/1"
    assert set(value) == {
        "schema", "fits", "model", "hardware", "workload", "memory", "ledger_peaks",
        "checkpoint_nbytes", "step", "ssd", "plan", "shortfalls", "changes", "notes", "config",
    }  # fmt: skip
    assert value["fits"] is case.fits
    for tier, place in case.memory.places.items():
        there = value["memory"][tier]
        assert there["peak_nbytes"] == sum(there["by_class"].values()) == place.peak_nbytes
    if case.step is not None:
        step = value["step"]
        assert step["tokens_per_s"] == pytest.approx(16384 / case.step.seconds)
        assert {link["name"] for link in step["links"]} >= {"compute", "nvme write"}


def test_life_is_the_rated_bytes_by_those_of_a_step() -> None:
    value = json.loads(to_json(CASES["fits"]))
    assert value["ssd"] == {
        "endurance_nbytes": 600 * 10**12, "life_steps": 600 * 10**12 // (190 * GiB)
    }  # fmt: skip
    assert json.loads(to_json(CASES["no times"]))["ssd"]["life_steps"] is None


# ---------------------------------------------------------------- HTML
class Page(HTMLParser):
    """What a page is made of. Tags that are not closed in order fail."""

    VOID = frozenset({"meta", "br", "rect", "!doctype"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@every_case
def test_the_page_is_whole_and_fetches_and_runs_nothing(case: Estimate) -> None:
    text = to_html(case)
    page = Page(text)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    assert not re.search(r"https?:|//|@import|url\(", text)
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "prefers-color-scheme:dark" in text
    for figure in ("checkpoint", "Peak memory"):
        assert figure in page.text


@every_case
def test_pieces_of_a_drawing_do_not_overlap_and_have_their_values_beside_them(
    case: Estimate,
) -> None:
    drawings = re.findall(r'<svg class="(stack|lane)".*?</svg></svg>', to_html(case))
    assert drawings.count("stack") == len(case.memory.places)
    for drawing in re.findall(r'<svg class="stack".*?</svg></svg>', to_html(case)):
        pieces = re.findall(r'<svg x="([\d.e-]+)%" width="([\d.e-]+)%"', drawing)
        ends = [float(x) + float(width) for x, width in pieces]
        for end, (x, _) in zip(ends, pieces[1:], strict=False):
            assert end <= float(x) + 0.05
        assert ends[-1] <= 100.0


def test_labels_are_drawn_only_where_they_fit() -> None:
    thin = held(1000 * GiB, 0, 0, 1 * GiB, capacity=2000 * GiB)
    page = Page(to_html(thin))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", to_html(thin))
    assert "parameters" in texts
    assert "optimizer" not in texts
    assert "optimizer1.0 GiB<0.1 %" in page.text  # in the key


def test_text_of_others_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    span = Span("compute", evil, 0.0, 1.0)
    case = replace(
        CASES["does not"], model=evil, hardware=evil, notes=(evil,),
        step=StepEstimate(1.0, (LinkTime(evil, 1.0),), evil, 1, (span,)),
        shortfalls=(Shortfall(Tier.HOST, 2, 1, "budget.host", evil),),
    )  # fmt: skip
    assert "<script" not in to_html(case)


# ---------------------------------------------------------------- colours
def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read_on_every_colour(theme: Theme) -> None:
    for colour in theme.colours:
        assert contrast(ink_on(colour), colour) >= 4.5
    for ink in (theme.ink, theme.quiet, theme.good, theme.bad):
        assert contrast(ink, theme.card) >= 4.5
        assert contrast(ink, theme.page) >= 4.5
    assert len(set(theme.colours)) == len(MemoryClass)


# ---------------------------------------------------------------- PNG
@pytest.mark.parametrize("dark", [False, True])
def test_a_png_is_drawn_in_the_colours_asked_for(dark: bool) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(to_png(CASES["tiny"], dark=dark))).convert("RGB")
    assert image.width == 1440
    page = (DARK if dark else LIGHT).page
    assert image.getpixel((2, 2)) == tuple(int(page[i : i + 2], 16) for i in (1, 3, 5))


@every_case
def test_no_text_of_a_png_overlaps_another_or_leaves_the_page(case: Estimate) -> None:
    figure = draw(case, LIGHT)
    boxes = _text_boxes(figure)
    for index, (text, box) in enumerate(boxes):
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        for other, there in boxes[index + 1 :]:
            apart = (
                box.x1 <= there.x0 + 1 or there.x1 <= box.x0 + 1
                or box.y1 <= there.y0 + 2 or there.y1 <= box.y0 + 2
            )  # fmt: skip
            assert apart, f"{text!r} overlaps {other!r}"


def _text_boxes(figure: Any) -> list[tuple[str, Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)  # keys are laid out while they are drawn
    found = figure.findobj(Text)
    return [
        (t.get_text(), t.get_window_extent(renderer))
        for t in found
        if t.get_text() and t.get_visible()
    ]


@settings(max_examples=5, deadline=None)
@given(st.text(max_size=200), sizes)
def test_any_name_and_any_sizes_can_be_drawn(name: str, nbytes: list[int]) -> None:
    case = replace(held(*nbytes), model=name, hardware=name)
    text_of(case, 80)
    to_json(case)
    Page(to_html(case))


def test_places_have_one_order_and_one_name_everywhere() -> None:
    titles = [bar.title for bar in view.bars(memory(gpu=True))]
    assert titles == ["GPU memory", "RAM", "Disk (nvme)"]
