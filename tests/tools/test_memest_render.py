"""What an estimate is shown as: nothing overlaps, nothing is lost, nothing is fetched or run."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from offload.pages.page import to_html
from offload.pages.pictures import DARK
from offload.planning.plan.estimate import (
    Estimate,
    LinkTime,
    MemoryClass,
    MemoryEstimate,
    PlaceEstimate,
    Shortfall,
    StepEstimate,
)
from offload.planning.plan.experts import ExpertEstimate
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show import view
from offload.tools.memest.show.estimate_page import estimate_page, stretches
from offload.tools.memest.show.render_json import SCHEMA, to_dict
from offload.tools.memest.show.tables import page_table
from tests.tools.estimates import GiB, estimate

EXPERTS = ExpertEstimate(
    tables=47, experts=3008, chosen=6, numel=int(27e9), active_numel=int(4.2e9), tokens=97,
    touched_pass=0.987, touched_step=0.9997,
)  # fmt: skip
CASES = {
    "fits": estimate(),
    "does not": estimate(gpu=True, fits=False),
    "huge": estimate(gpu=True, scale=1e4),
    "no times": estimate(step=None),
    "experts": estimate(experts=EXPERTS),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def held(*nbytes: int, capacity: int = 24 * GiB) -> Estimate:
    place = PlaceEstimate(capacity, dict(zip(MemoryClass, nbytes, strict=False)))
    places = {Tier.DEVICE: place}
    return estimate(memory=MemoryEstimate(places, {Tier.DEVICE: sum(nbytes)}, 0))


def text_of(case: Estimate, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(page_table(estimate_page(case)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def page_of(case: Estimate) -> str:
    return to_html(estimate_page(case), by="memest")


# ---------------------------------------------------------------- bars and lanes
sizes = st.lists(st.integers(0, 1 << 50), min_size=1, max_size=len(MemoryClass)).filter(any)


def places(case: Estimate) -> list[PlaceEstimate]:
    return [place for _, place in view.places_of(case)]


@settings(deadline=None)
@given(sizes, st.integers(0, 1 << 45))
def test_bars_are_stacked_by_class_and_end_at_what_is_filled(
    nbytes: list[int], capacity: int
) -> None:
    (place,) = places(held(*nbytes, capacity=capacity))
    found = list(stretches(place))
    assert [each.meaning for each in found] == [
        name for name, n in place.by_class.items() if n
    ][: len(found)]  # fmt: skip
    assert all(a.stop == b.start for a, b in pairwise(found))
    filled = view.filled(place) if capacity else 1.0
    assert found[-1].stop == pytest.approx(min(3.0, filled))


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


# ---------------------------------------------------------------- table
@every_case
def test_a_narrow_table_keeps_every_number(case: Estimate) -> None:
    text = text_of(case, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for name in MemoryClass:
        held = any(place.by_class.get(name, 0) for place in case.memory.places.values())
        assert (f"{name} " in text) is held
    if case.step is not None:
        assert f"bound by {case.step.bottleneck}" in text


def test_the_table_says_what_is_short_and_what_each_change_costs() -> None:
    text = text_of(CASES["does not"], 80)
    assert text.startswith("does not fit: RAM is 32.0 GiB short")
    assert re.search(r"\+42 % +-o placement.optimizer=nvme", text)
    assert "--ram 96GiB" in text
    assert re.search(r"-16 % +-o optimizer.states=int8 -o micro_batches=4", text)


@pytest.mark.parametrize("over_mib", [1, 3])
def test_the_table_says_by_how_much_where_two_figures_look_alike(over_mib: int) -> None:
    """Headline and table have one figure, the larger of what the plan and what the peak lacks."""
    full = PlaceEstimate(4 << 30, {MemoryClass.STAGING: (4 << 30) + (over_mib << 20)})
    memory = replace(CASES["fits"].memory, places={Tier.HOST: full})
    needed = (4 << 30) + ((4 - over_mib) << 20)
    short = Shortfall(Tier.HOST, needed, 4 << 30, "budget.host", "full")
    case = replace(CASES["fits"], memory=memory, system_nbytes=2 << 30, shortfalls=(short,))
    text = text_of(case, 80)
    rows = [line.split() for line in text.splitlines()]
    assert text.startswith("does not fit: RAM is 3.0 MiB short")
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
    assert value["schema"] == SCHEMA == "memest/2"
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

    VOID = frozenset({"meta", "br", "!doctype"})

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


@pytest.mark.sample(2)
@every_case
def test_the_page_is_whole_and_fetches_and_runs_nothing(case: Estimate) -> None:
    text = page_of(case)
    page = Page(text)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    namespaces = r' xmlns(:xlink)?="http://www.w3.org/[0-9a-z/]*"'
    assert not re.search(r"https?:|//|@import|url\((?!#)", re.sub(namespaces, "", text))
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "prefers-color-scheme: dark" in text
    for figure in ("checkpoint", "Peak memory"):
        assert figure in page.text


def test_text_of_others_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    case = replace(
        CASES["does not"], model=evil, hardware=evil, notes=(evil,),
        step=StepEstimate(1.0, (LinkTime(evil, 1.0),), evil, 1),
        shortfalls=(Shortfall(Tier.HOST, 2, 1, "budget.host", evil),),
    )  # fmt: skip
    assert "<script" not in page_of(case)


# ---------------------------------------------------------------- one answer in all formats
@every_case
def test_table_and_page_have_the_same_numbers_and_those_are_json_s(case: Estimate) -> None:
    value = to_dict(case)
    shown = {"table": text_of(case, 200), "page": Page(page_of(case)).text}
    expected = [format_bytes(value["checkpoint_nbytes"])]
    for place in value["memory"].values():
        sizes = [*place["by_class"].values(), place["peak_nbytes"], place["capacity_nbytes"]]
        expected += [format_bytes(nbytes) for nbytes in sizes if nbytes]
    if value["step"] is not None:
        expected += [view.duration(link["seconds"]) for link in value["step"]["links"]]
        expected.append(view.duration(value["step"]["seconds"]))
        expected.append(view.per_second(value["step"]["tokens_per_s"]))
    if value["experts"] is not None:
        active, there = value["experts"]["active_parameters"], value["experts"]["experts"]
        expected += [f"{view.counted(active)} active per token", f"{there:,} experts"]
    for change in value["changes"]:
        expected.append(view.factor_of_time(change["step_factor"]))
        expected += [f"{key}" for key in change["settings"]]
    expected += [each["message"] for each in value["shortfalls"]] + value["notes"]
    for name, text in shown.items():
        flat = " ".join(text.replace("· ", "").split())
        for word in expected:
            assert word in flat, f"{name}: {word}"


@pytest.mark.sample(3)
@every_case
def test_a_class_has_its_colour_on_the_terminal(case: Estimate) -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(page_table(estimate_page(case)))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for name in MemoryClass:
        red, green, blue = (int(DARK[name][i : i + 2], 16) for i in (1, 3, 5))
        if any(place.by_class.get(name) for place in places(case)):
            assert f"\x1b[38;2;{red};{green};{blue}m■ \x1b[0m{name}" in printed


@settings(max_examples=5, deadline=None)
@given(st.text(max_size=200), sizes)
def test_any_name_and_any_sizes_can_be_drawn(name: str, nbytes: list[int]) -> None:
    case = replace(held(*nbytes), model=name, hardware=name)
    text_of(case, 80)
    to_dict(case)


def test_places_have_one_order_and_one_name_everywhere() -> None:
    case = estimate(gpu=True)
    titles = ["GPU memory", "RAM", "Disk (nvme)"]
    assert [view.PLACE_TITLES[tier] for tier, _ in view.places_of(case)] == titles
    memory = next(each for each in estimate_page(case).sections if each.title == "Peak memory")
    assert memory.tables[0].heads == ("", *titles)
