"""What an estimate is shown as: nothing overlaps, nothing is lost, nothing is fetched or run."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from offload.pages.colours import DARK, LIGHT
from offload.pages.svg import LEAST_PX
from offload.pages.ticks import byte_ticks, ticks
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
from offload.planning.plan.experts import ExpertBytes, ExpertEstimate
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show import view
from offload.tools.memest.show.bars import (
    LEAST_WIDTH,
    Held,
    byte_bars,
    capacity_bars,
    lanes,
    step_length,
)
from offload.tools.memest.show.estimate_sheet import estimate_sheet
from offload.tools.memest.show.render_html import to_html
from offload.tools.memest.show.render_json import SCHEMA, to_dict
from offload.tools.memest.show.render_table import to_table
from offload.tools.memest.show.sheet import (
    Bar,
    Bars,
    Figures,
    Lines,
    Piece,
    Sheet,
    Table,
    as_cell,
    label_room,
)
from tests.tools.estimates import GiB, estimate, memory

EXPERTS = ExpertEstimate(
    tables=47, experts=3008, chosen=6, numel=int(27e9), active_numel=int(4.2e9), tokens=97,
    touched_pass=0.987, touched_step=0.9997,
    moved=(
        ExpertBytes("weights, for forward and backward", 37 * GiB, 41 * GiB),
        ExpertBytes("gradients", 19 * GiB, 23 * GiB),
    ),
)  # fmt: skip
CASES = {
    "much too large": estimate(gpu=True, memory=memory(gpu=True, scale=50)),
    "fits": estimate(),
    "does not": estimate(gpu=True, fits=False),
    "tiny": estimate(gpu=True, scale=1e-6),
    "huge": estimate(gpu=True, scale=1e4),
    "no times": estimate(step=None),
    "experts": estimate(experts=EXPERTS),
    "experts over ranks": estimate(experts=replace(EXPERTS, ep_size=8, sent_nbytes=29 * GiB)),
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


def sheet_of(case: Estimate) -> Sheet:
    return estimate_sheet(case)


def page_of(case: Estimate) -> str:
    return to_html(sheet_of(case))


def bars_of(case: Estimate) -> Bars:
    return capacity_bars("", [Held.of(str(t), place) for t, place in view.places_of(case)])


# ---------------------------------------------------------------- bars and lanes
sizes = st.lists(st.integers(0, 1 << 50), min_size=1, max_size=len(MemoryClass)).filter(any)


@settings(deadline=None)
@given(sizes, st.integers(1, 1 << 45))
def test_pieces_touch_and_none_is_too_thin_to_see(nbytes: list[int], capacity: int) -> None:
    case = held(*nbytes, capacity=capacity)
    for (bar,) in (bars_of(case).bars, byte_bars("", [Held.of("", *places(case))]).bars):
        present = [format_bytes(n) for n in nbytes if n > 0]
        assert [each.value for each in bar.pieces] == present[: len(bar.pieces)]
        assert bar.broken or len(bar.pieces) == len(present)
        edges = [0.0, *(each.stop for each in bar.pieces)]
        assert [each.start for each in bar.pieces] == edges[:-1]
        assert edges[-1] <= 1.0 + 1e-9
        assert all(b - a >= LEAST_WIDTH * 0.999 for a, b in pairwise(edges[:-1]))
        assert 0 <= bar.track <= 1
        assert (bar.state == "bad") is (sum(nbytes) > capacity)


def places(case: Estimate) -> list[PlaceEstimate]:
    return [place for _, place in view.places_of(case)]


def test_a_full_bar_ends_at_capacity_and_one_half_full_at_half_of_it() -> None:
    half, full = held(6 * GiB, 2 * GiB, capacity=16 * GiB), held(24 * GiB)
    assert [s.stop for s in bars_of(half).bars[0].pieces] == pytest.approx([0.375, 0.5])
    assert [s.stop for s in bars_of(full).bars[0].pieces] == pytest.approx([1.0])
    assert [(tick.text, tick.at) for tick in bars_of(half).ticks][-1] == ("capacity", 1.0)


def test_all_capacities_of_a_picture_are_at_one_line() -> None:
    """GPU 24 GiB, RAM 64 GiB, disk 500 GiB; RAM holds one and a half times what it can."""
    found = bars_of(estimate(gpu=True, memory=memory(gpu=True, scale=2.45)))
    assert len(found.bars) == 3
    (line,) = {bar.track for bar in found.bars}
    assert 1 / 3 < line < 1
    assert all(bar.mark and not bar.broken for bar in found.bars)
    assert [t.at for t in found.ticks if t.text == "capacity"] == [pytest.approx(line)]


def test_what_is_fifty_times_too_large_is_broken_off_and_leaves_the_others_their_room() -> None:
    big = Held.of("RAM", PlaceEstimate(1 * GiB, {MemoryClass.OPTIMIZER: 50 * GiB}))
    small = Held.of("GPU", PlaceEstimate(24 * GiB, {MemoryClass.STAGING: 24 * GiB}))
    ram, gpu = capacity_bars("", [big, small]).bars
    assert (ram.broken, gpu.broken) == (True, False)
    assert ram.pieces[-1].stop == 1.0
    assert gpu.pieces[-1].stop == pytest.approx(1 / 3)
    assert ram.value == "50.0 GiB of 1.0 GiB (x 50.0)"


def test_a_place_that_is_not_there_is_drawn_with_what_it_would_hold() -> None:
    (bar,) = bars_of(held(GiB, GiB, capacity=0)).bars
    assert (bar.track, bar.state, bar.pieces[-1].stop) == (0.0, "bad", pytest.approx(1.0))
    assert bars_of(held(GiB, capacity=0)).ticks == ()  # of what is not there
    (bar,) = bars_of(held(0, capacity=0)).bars
    assert (bar.pieces, bar.state) == ((), "")


def test_one_scale_of_bytes_is_one() -> None:
    bars = byte_bars("", [Held.of("", place) for place in places(CASES["does not"])]).bars
    longest = max(place.peak_nbytes for place in places(CASES["does not"]))
    for bar, place in zip(bars, places(CASES["does not"]), strict=True):
        assert bar.pieces[-1].stop == pytest.approx(place.peak_nbytes / longest, abs=0.02)


def test_no_line_and_no_break_cross_a_label() -> None:
    piece = Piece("optimizer", "optimizer", "", "", 0.2, 0.8)
    assert label_room(Bar("", (piece,), track=0.4, mark=True), piece) == (0.4, 0.8)
    assert label_room(Bar("", (piece,), track=0.4), piece) == (0.2, 0.8)
    piece = Piece("optimizer", "optimizer", "", "", 0.2, 1.0)
    left, right = label_room(Bar("", (piece,), track=1 / 3, mark=True, broken=True), piece)
    assert left == 1 / 3
    assert right < 0.93
    piece = Piece("master", "master", "", "", 0.95, 1.0)
    assert label_room(Bar("", (piece,), broken=True), piece) == (0.95, 1.0)  # too short for it


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


@settings(deadline=None)
@given(st.integers(1, 1 << 62), st.integers(2, 5))
def test_ticks_of_bytes_are_few_round_and_inside(length: int, wanted: int) -> None:
    marks = byte_ticks(length, wanted)
    assert 2 <= len(marks) <= 9
    assert all(0 <= mark.at <= 1 for mark in marks)
    assert all(b.at > a.at for a, b in pairwise(marks))
    assert all(re.fullmatch(r"[\d,.]+ ([KMGT]i)?B", mark.text) for mark in marks[1:])


@settings(deadline=None)
@given(st.floats(1e-6, 1e10))
def test_the_axis_of_a_narrow_page_has_room_for_its_texts(length: float) -> None:
    for marks in (ticks(length, 3), byte_ticks(max(1, int(length * 1e6)), 3)):
        ends = [(mark.at * LEAST_PX, 6.7 * len(mark.text)) for mark in marks]
        for (left, wide), (right, next_wide) in pairwise(ends):
            half = wide / 2 if left else wide
            assert left + half <= right - (next_wide if right > 0.97 * LEAST_PX else next_wide / 2)


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
    found = lanes(step)
    assert [bar.name for bar in found.bars] == ["compute", "optimizer", "nvme read", "nvme write"]
    assert [piece.label for piece in found.bars[0].pieces] == ["forward", "backward"]
    assert found.keys[:3] == (
        ("compute", "forward"),
        ("backward", "backward"),
        ("update", "update"),
    )
    assert step_length(step) == 92.0


def test_a_span_that_outlasts_the_step_stays_on_the_axis_beyond_the_step_s_line() -> None:
    step = StepEstimate(1.0, (LinkTime("compute", 1.0),), "compute", 1,
                        (Span("compute", "forward", 0.0, 1.5),))  # fmt: skip
    (bar,) = lanes(step).bars
    assert bar.pieces[0].stop == 1.0
    assert bar.mark
    assert bar.track == pytest.approx(1 / 1.5)


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
    value = json.loads(json.dumps(to_dict(case), allow_nan=False))
    assert value["schema"] == SCHEMA == "memest/1"
    assert set(value) == {
        "schema", "fits", "verdict", "model", "hardware", "workload", "memory", "ledger_peaks",
        "checkpoint_nbytes", "step", "inference", "experts", "ssd", "plan", "shortfalls", "changes",
        "notes", "config",
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
    value = to_dict(CASES["fits"])
    assert value["ssd"] == {
        "endurance_nbytes": 600 * 10**12, "life_steps": 600 * 10**12 // (190 * GiB)
    }  # fmt: skip
    assert to_dict(CASES["no times"])["ssd"]["life_steps"] is None


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
    text = page_of(case)
    page = Page(text)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    assert not re.search(r"https?:|//|@import|url\(", text)
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "prefers-color-scheme:dark" in text
    for figure in ("checkpoint", "Peak memory"):
        assert figure in page.text


def test_labels_are_drawn_only_where_they_fit_on_a_narrow_page() -> None:
    thin = held(1000 * GiB, 0, 0, 1 * GiB, capacity=2000 * GiB)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", page_of(thin))
    assert "parameters" in texts
    assert "optimizer" not in texts
    assert "optimizer1.0 GiB" in Page(page_of(thin)).text  # in the table


@every_case
def test_every_drawing_says_in_words_what_it_shows(case: Estimate) -> None:
    drawn = r'<svg class="stack" role="img" aria-label="([^"]*)"'
    labels = [unescape(label) for label in re.findall(drawn, page_of(case))]
    for place in places(case):
        used = view.used_text(place)
        assert any(used in label for label in labels)
        for nbytes in filter(None, place.by_class.values()):
            assert any(format_bytes(nbytes) in label for label in labels)


def test_text_of_others_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    span = Span("compute", evil, 0.0, 1.0)
    case = replace(
        CASES["does not"], model=evil, hardware=evil, notes=(evil,),
        step=StepEstimate(1.0, (LinkTime(evil, 1.0),), evil, 1, (span,)),
        shortfalls=(Shortfall(Tier.HOST, 2, 1, "budget.host", evil),),
    )  # fmt: skip
    assert "<script" not in page_of(case)


# ---------------------------------------------------------------- one answer in all formats
def words_of(sheet: Sheet) -> Iterator[str]:
    """Every text of a sheet."""
    yield from (sheet.title, *sheet.about, sheet.verdict)
    for block in sheet.blocks:
        match block:
            case Figures(figures):
                yield from (text for each in figures for text in (each.name, each.value))
            case Lines(texts):
                yield from texts
            case Table(heads, rows):
                yield from heads
                cells = (as_cell(cell) for row in rows for cell in row)
                yield from (text for cell in cells for text in (*cell.code, cell.text))
            case Bars():
                yield from (each.value for each in block.bars)


@every_case
def test_table_and_page_have_the_same_numbers_and_those_are_json_s(case: Estimate) -> None:
    value, sheet = to_dict(case), sheet_of(case)
    shown = {
        "table": text_of(case, 200),
        "page": Page(page_of(case)).text,
        "sheet": "\n".join(words_of(sheet)),
    }
    expected = [format_bytes(value["checkpoint_nbytes"])]
    for place in value["memory"].values():
        sizes = [*place["by_class"].values(), place["peak_nbytes"], place["capacity_nbytes"]]
        expected += [format_bytes(nbytes) for nbytes in sizes if nbytes]
    if value["step"] is not None:
        expected += [view.duration(link["seconds"]) for link in value["step"]["links"]]
        expected.append(view.duration(value["step"]["seconds"]))
        expected.append(view.per_second(value["step"]["tokens_per_s"]))
    if value["experts"] is not None:
        for each in value["experts"]["moved"]:
            sizes = each["touched_nbytes"], each["all_nbytes"]
            expected += [each["name"], *(format_bytes(nbytes) for nbytes in sizes)]
        active, there = value["experts"]["active_parameters"], value["experts"]["experts"]
        expected += [f"{view.counted(active)} active per token", f"{there:,} experts"]
        ep_size, here = (value["experts"][key] for key in ("ep_size", "experts_per_rank"))
        if ep_size > 1:
            expected.append(f"ep_size {ep_size}, of offload.moe.MoE: a rank has {here:,} of")
            expected.append(f"sends {format_bytes(value['experts']['sent_nbytes'])}")
    for change in value["changes"]:
        expected.append(view.factor_of_time(change["step_factor"]))
        expected += [f"{key}" for key in change["settings"]]
    expected += [each["message"] for each in value["shortfalls"]] + value["notes"]
    for name, text in shown.items():
        flat = " ".join(text.replace("· ", "").split())
        for word in expected:
            assert word in flat, f"{name}: {word}"
    flat = " ".join(shown["page"].split())
    for text in words_of(sheet):
        assert " ".join(text.split()) in flat, text


@every_case
def test_a_class_has_its_colour_in_bars_table_and_terminal(case: Estimate) -> None:
    sheet = sheet_of(case)
    for block in sheet.blocks:
        if isinstance(block, Bars):
            for piece in (piece for bar in block.bars for piece in bar.pieces):
                known = piece.meaning in LIGHT.of
                assert known
                if piece.label in set(MemoryClass):
                    assert piece.meaning == piece.label
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(to_table(case))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for name in MemoryClass:
        red, green, blue = (int(DARK.of[name][i : i + 2], 16) for i in (1, 3, 5))
        if any(place.by_class.get(name) for place in places(case)):
            assert f"\x1b[38;2;{red};{green};{blue}m■ \x1b[0m{name}" in printed


@settings(max_examples=5, deadline=None)
@given(st.text(max_size=200), sizes)
def test_any_name_and_any_sizes_can_be_drawn(name: str, nbytes: list[int]) -> None:
    case = replace(held(*nbytes), model=name, hardware=name)
    text_of(case, 80)
    to_dict(case)
    Page(page_of(case))


def test_places_have_one_order_and_one_name_everywhere() -> None:
    case = estimate(gpu=True)
    titles = ["GPU memory", "RAM", "Disk (nvme)"]
    assert [view.PLACE_TITLES[tier] for tier, _ in view.places_of(case)] == titles
    bars = next(block for block in sheet_of(case).blocks if isinstance(block, Bars))
    assert [bar.name for bar in bars.bars] == titles
