"""What an estimate is shown as: nothing overlaps, nothing is lost, nothing is fetched or run."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from offload.display.words import counted, duration
from offload.planning.plan.estimate import LinkTime, MemoryClass, Shortfall, StepEstimate
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.result import Estimate
from offload.tools.memest.show import view
from offload.tools.memest.show.estimate_page import estimate_page
from offload.tools.memest.show.page import to_html
from offload.tools.memest.show.render_json import SCHEMA, to_dict
from offload.tools.memest.show.render_terminal import page_table
from tests.tools.estimates import estimate

CASES = {
    "fits": estimate(),
    "does not": estimate(gpu=True, fits=False),
    "huge": estimate(gpu=True, scale=1e4),
    "no times": estimate(step=None),
    "experts": estimate(active_numel=int(4.2e9)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def text_of(case: Estimate, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(page_table(estimate_page(case)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def page_of(case: Estimate) -> str:
    return to_html(estimate_page(case))


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
    assert re.search(r"-16 % +-o optimizer.states=int8 -o precision=bf16", text)


def test_names_are_not_markup() -> None:
    text = text_of(replace(CASES["fits"], model="[bold]x[/bold]", notes=("[red]y",)), 80)
    assert "[bold]x[/bold]" in text
    assert "[red]y" in text


# ---------------------------------------------------------------- JSON
@every_case
def test_json_has_the_documented_fields(case: Estimate) -> None:
    value = json.loads(json.dumps(to_dict(case), allow_nan=False))
    assert value["schema"] == SCHEMA == "memest/3"
    assert set(value) == {
        "schema", "fits", "verdict", "model", "hardware", "workload", "memory", "ledger_peaks",
        "checkpoint_nbytes", "step", "inference", "ssd", "plan", "shortfalls", "changes",
        "notes", "config",
    }  # fmt: skip
    assert value["fits"] is case.fits
    for tier, place in case.memory.places.items():
        there = value["memory"][str(tier)]
        assert there["peak_nbytes"] == sum(there["by_class"].values()) == place.peak_nbytes
    if case.step is not None:
        step = value["step"]
        assert step["tokens_per_s"] == pytest.approx(16384 / case.step.seconds)
        assert {link["name"] for link in step["links"]} >= {"compute", "nvme write"}


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
        expected += [duration(link["seconds"]) for link in value["step"]["links"]]
        expected.append(duration(value["step"]["seconds"]))
        expected.append(view.per_second(value["step"]["tokens_per_s"]))
    if value["model"]["active"] is not None:
        expected += [f"{counted(value['model']['active'])} active per token"]
    for change in value["changes"]:
        expected.append(view.factor_of_time(change["step_factor"]))
        expected += [f"{key}" for key in change["settings"]]
    expected += [each["message"] for each in value["shortfalls"]] + value["notes"]
    for name, text in shown.items():
        flat = " ".join(text.replace("· ", "").split())
        for word in expected:
            assert word in flat, f"{name}: {word}"
