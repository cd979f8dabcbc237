"""run.html: one page of whatever a run's folder holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.errors import ConfigError
from offload.pages.page import Cell, Figure, Page, Section, Table, to_html
from offload.runs.folder import RunFolder
from offload.runs.page import run_page, write_page

LINKS = ("nvme read", "nvme write", "host to device", "device to host")


def rows(count: int, **changes: Any) -> Iterator[dict[str, Any]]:
    """Steps of a run as its metrics have them; `changes` are values for all of them."""
    for step in range(1, count + 1):
        yield {
            "step": step, "loss": 5.0 / step, "lr": 1e-3, "seconds": 0.5,
            "tokens_per_second": 100.0, "gradient_norm": 1.0, "skipped_steps": 0,
            "rss_nbytes": 500 << 20,
            "tiers": {"device": 1 << 20, "host": 2 << 20, "nvme": 3 << 20},
            "moved": dict.fromkeys(LINKS, step * 1000000), "validation_loss": None,
            "waited": {"nvme": 0.1, "link": 0.0, "update": 0.05, "ranks": 0.0},
            **changes,
        }  # fmt: skip


def write(folder: Path, lines: Any, **files: str) -> Path:
    """A run's folder: rows or texts for metrics.jsonl, and other files, `_` for `.` in names."""
    folder.mkdir(parents=True)
    texts = (line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text("".join(texts))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


SETTINGS = "budget: {host: 4194304, nvme: 8388608}\ntrain: {steps: 40, model: {layers: 4}}\n"
MEASURED = json.dumps(
    {"format": 1, "tiers": {"host": 3 << 20}, "rss_nbytes": 600 << 20, "seconds": 0.5, "steps": 40}
)


class Checked(HTMLParser):
    """Fails for a tag that is not closed, is a script, or fetches anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.pictures: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given_ = dict(attributes)
        assert tag not in ("script", "link", "iframe", "img", "object")
        assert not {"src", "href"} & set(given_)
        assert (given_.get("xlink:href") or "#").startswith("#")  # within the page
        assert not any(name.startswith("on") for name in given_)
        if given_.get("role") == "img":
            self.pictures.append(given_.get("aria-label") or "")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in ("g", "path", "rect", "use")
        assert (dict(attributes).get("xlink:href") or "#").startswith("#")
        assert not any(name.startswith("on") for name, _ in attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> tuple[str, list[str]]:
    """The page's words, and what is said of its pictures."""
    checked = Checked()
    checked.feed(page)
    checked.close()
    assert checked.open == []
    assert all(checked.pictures)
    assert "url(" not in page.replace("url(#", "")
    return " ".join(" ".join(checked.text).split()), checked.pictures


def test_a_run_is_on_the_page(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "mine", rows(40), config__resolved__yaml=SETTINGS, measured__json=MEASURED,
    )  # fmt: skip
    text, pictures = check(run_page(folder))
    for said in (
        "mine ended after 40 of 40 steps",
        "host 2.0 MiB 3.0 MiB 4.0 MiB", "RAM of the process 500.0 MiB 600.0 MiB -",
        "waited for in all of the steps' time nvme 4.00 s 20 %", "update 2.00 s 10 %",
        "layers: 4",
    ):  # fmt: skip
        assert said in text
    assert pictures[0].startswith("loss: offload: 5 at 1, 0.125 at 40")
    assert pictures[1].startswith("tokens/s")
    assert "host: 50% at 1, 50% at 40; nvme: 38% at 1" in pictures[2]


CASES: dict[str, tuple[Any, dict[str, str]]] = {
    "no step": ([], {"config__resolved__yaml": SETTINGS}),
    "one step": (rows(1), {}),
    "three steps": (rows(3), {"measured__json": MEASURED}),
    "no loss ever": (rows(9, loss=None, lr=None, tokens_per_second=None), {}),
    "no waits": (rows(9, waited={}), {}),
    "of an older version": ([{"step": 1, "loss": 1.0, "seconds": 1.0}], {}),
    "ranks": (rows(9, moved={"all-gather": 5, "reduce-scatter": 7}), {}),
    "no seconds": (rows(9, seconds=0.0), {}),
    "huge": (rows(9, loss=1e308, rss_nbytes=1 << 60, gradient_norm=1e300), {}),
    "tiny": (rows(9, loss=1e-320, gradient_norm=5e-324), {}),
    "negative": (rows(9, loss=-1.0, seconds=-4.0, tiers={"host": -5}, moved={"nvme read": -1}), {}),
    "of other types": (
        rows(9, tiers=[1], moved="x", waited=None, lr=True, gradient_norm="1"),
        {"config__resolved__yaml": "[1, 2", "measured__json": "[]"},
    ),
    "lists for sections": (
        rows(9),
        {"config__resolved__yaml": "budget: [1]\ntrain: 3\nplacement: {a: {tier: [1]}}\n"},
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_whatever_there_is_is_shown(case: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    lines, files = case
    text, _ = check(run_page(write(tmp_path / "run", lines, **files)))
    assert "nan" not in text.replace("nanoseconds", "")
    assert "inf " not in text


def test_what_files_say_is_never_html(tmp_path: Path) -> None:
    evil = "</pre></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    names = {"tiers": {evil: 5}, "moved": {evil: 7}, "waited": {evil: 1.0}}
    folder = write(
        tmp_path / "a <b> & \"c\" 'd'", rows(4, **names),
        config__resolved__yaml=json.dumps(
            {"train": {"model": {"shape": evil, "layers": evil}, "text": evil}, "budget": {evil: 5},
             "placement": {evil: {evil: evil}}, "device": evil}
        ),
    )  # fmt: skip
    page = run_page(folder)
    text, _ = check(page)
    assert page.count("<script") == page.count("<img") == 0
    assert text.count("<script>alert(1)</script>") >= 4


def test_lines_that_are_no_steps_are_left_out(tmp_path: Path) -> None:
    bad = ["garbage\n", "[1]\n", "null\n", '{"step": "x"}\n', '{"loss": 1.0}\n']
    folder = write(tmp_path / "run", [*rows(5), *bad, "\n", '{"step": 6, "loss": 1.2, "ti'])
    text, _ = check(run_page(folder))
    assert "5 steps; under way when this page was made, or cut short" in text


@pytest.mark.parametrize(
    ("measured", "said", "kind"),
    [
        ({}, "ended after 4 steps", "good"),
        ({"stopped": True}, "stopped by Ctrl-C or SIGTERM after 4 steps, all saved", "good"),
        ({"cut_short": True}, "4 steps; ended by an error", "bad"),
        (None, "4 steps; under way when this page was made, or cut short", "bad"),
    ],
)
def test_the_page_says_how_the_run_ended(
    measured: dict[str, bool] | None, said: str, kind: str, tmp_path: Path
) -> None:
    files = {} if measured is None else {"measured.json": json.dumps({"steps": 4, **measured})}
    page = run_page(write(tmp_path / "run", rows(4), **files))
    assert f'<p class="verdict {kind}">{said}' in page


def test_a_name_with_control_characters_moves_no_cursor(tmp_path: Path) -> None:
    page = run_page(write(tmp_path / "a\x1b[31mb", rows(2)))
    assert "\x1b" not in page
    assert "a\\x1b[31mb" in page


def test_losses_that_are_not_finite_are_named(tmp_path: Path) -> None:
    lines = [*rows(4), {"step": 5, "loss": None, "seconds": 1.0}]
    text, _ = check(run_page(write(tmp_path / "run", lines)))
    assert "the loss was not finite in 1 step, first in step 5" in text
    assert "loss not finite" in text


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    page = run_page(write(tmp_path / "run", rows(5_000), config__resolved__yaml=SETTINGS))
    assert len(page) < 300_000
    check(page)


def test_without_matplotlib_a_page_says_what_draws_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", rows(4), config__resolved__yaml=SETTINGS)
    assert "<svg" in run_page(folder)
    monkeypatch.setattr("offload.runs.page.can_draw", lambda: False)
    page = run_page(folder)
    assert "pip install offload[report]" in page
    assert "<svg" not in page


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_page(tmp_path)


def test_the_command_makes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", rows(3))
    for path, status in ((folder, 0), (tmp_path / "none", 2)):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(path)])
        assert ended.value.code == status
    said = capsys.readouterr()
    assert said.out.strip() == str(folder / "run.html")
    assert "holds no run" in said.err


def test_a_page_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.metrics.path.write_text("")
    (tmp_path / "run/run.html").mkdir()  # in its way
    folder.close()
    assert "no run.html" in caplog.text


def test_a_page_has_both_schemes_and_escapes_all_texts() -> None:
    evil = "<script>&\x1b[31m"
    cell = Cell(evil, code=[evil], state="bad", strong=True)
    section = Section(evil, tables=[Table([evil, "n"], [[cell, "1"]])], lines=[evil], code=evil)
    figure = Figure(evil, evil, evil)
    html = to_html(Page(evil, evil, [evil], evil, "good", [figure], [section]), by=evil)
    assert html.count("&lt;script&gt;&amp;\\x1b[31m") == 14
    assert "<script" not in html
    assert "\x1b" not in html
    assert "screen and (prefers-color-scheme: dark)" in html
