"""What is drawn on a terminal, on a small model of one, and what is printed where there is none."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

import pytest
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from offload.display.console import PlainConsole, Prose
from offload.display.plain_text import echo
from offload.display.screen import Screen
from offload.display.training import Lines, Panel, Run
from offload.display.words import about
from offload.runs.metrics import StepMetrics

STYLE = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile(r"\x1b\[\??(\d*)([AKhl])")


class Terminal(io.StringIO):
    """Enough of one: text, line ends, the cursor up, lines erased. Lines that scroll away are
    kept."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.column = 0

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 77

    def write(self, text: str) -> int:
        rest = STYLE.sub("", text)
        while rest:
            control = CONTROL.match(rest)
            if control is not None:
                self._control(int(control[1] or 1), control[2])
                rest = rest[control.end() :]
                continue
            self._put(rest[0])
            rest = rest[1:]
        return len(text)

    def _control(self, count: int, what: str) -> None:
        if what == "A":
            self.row = max(self.row - count, len(self.lines) - self.rows, 0)
        elif what == "K":
            self.lines[self.row] = ""

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
        else:
            assert self.column < self.columns, "a line of ours would wrap"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


@pytest.fixture
def terminal_here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one of 80 columns. Standard output and standard error are there; to be called in a test
    itself, before which pytest replaces them once more."""

    def made() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stdout", found)
        monkeypatch.setattr(sys, "stderr", found)
        monkeypatch.setenv("TERM", "xterm")
        for name in ("NO_COLOR", "LINES", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)

        def size(fd: int) -> os.terminal_size:
            return os.terminal_size((found.columns, found.rows))

        monkeypatch.setattr(os, "get_terminal_size", size)
        return found

    return made


def values(step: int, **changed: Any) -> dict[str, Any]:
    known = StepMetrics(
        step=step, loss=2.5, lr=3e-4, seconds=0.5, tokens_per_second=8192.0, gradient_norm=1.25,
        skipped_steps=0, rss_nbytes=1 << 30,
        tiers={"device": 0, "host": 3 << 30, "nvme": 5 << 30},
        moved={"nvme read": step * 10**9, "nvme write": step * 10**8, "host to device": 0},
        waited={"nvme": 0.1, "link": 0.0, "update": 0.05, "loop": 0.01},
        elapsed_seconds=0.5 * step,
    ).values()  # fmt: skip
    return {**known, **changed}


BUDGETS = {"device": 0, "host": 4 << 30, "nvme": 100 << 30}


def panel(screen: Screen, steps: int | None = 1000) -> Panel:
    return Panel(Run(0, steps, BUDGETS), screen)


def drawn(display: Panel) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(display.drawing())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def shown(screen: Screen, display: Panel, step: int, **changed: Any) -> None:
    """Draw as if the last drawing had been long ago."""
    display._shown_at = -1e9
    display.log(values(step, **changed), step)


def test_a_panel_has_all_figures(terminal_here: Any) -> None:
    terminal = terminal_here()
    screen = Screen()
    display = panel(screen)
    shown(screen, display, 3)
    shown(screen, display, 5)
    shown(screen, display, 11)
    assert terminal.shown == [
        f"step      11/1,000   {'━' * 40}   about 8 min left",
        "          loss 2.5000   8,192 tokens/s   500 ms/step   norm 1.25   lr 0.0003",
        "moving    nvme read 2 GB/s   nvme write 200 MB/s",
        "holding   host ██████░░ 3.0 of 4.0 GiB   nvme ░░░░░░░░ 5.0 of 100.0 GiB",
        "time      computing 68%   nvme 20%   update 10%   loop 2%",
    ]
    display.close()
    assert terminal.shown[0].endswith("━   after 6 s")
    assert sys.stdout is terminal is sys.stderr
    print("what follows")
    assert terminal.shown[-1] == "what follows"


def test_what_is_printed_stays_above_the_panel(terminal_here: Any) -> None:
    terminal = terminal_here()
    screen = Screen()
    display = panel(screen)
    shown(screen, display, 1)
    print("one")
    print("two", file=sys.stderr)
    print("an unfinished", end=" ")
    print("line")
    shown(screen, display, 2)
    assert terminal.shown[:3] == ["one", "two", "an unfinished line"]
    assert [line.split()[0] for line in terminal.shown[3:]] == [
        "step", "loss", "moving", "holding", "time",
    ]  # fmt: skip
    display.close()


def test_what_our_own_console_prints_stays_above_the_panel(terminal_here: Any) -> None:
    terminal = terminal_here()
    screen, console = Screen(), PlainConsole()
    display = panel(screen)
    shown(screen, display, 1)
    console.print("a line of the run", style="bold")
    shown(screen, display, 2)
    assert terminal.shown[0] == "a line of the run"
    assert terminal.shown[1].startswith("step")
    assert len(terminal.shown) == 6
    display.close()


def test_a_terminal_that_is_closed_does_not_end_the_training(
    terminal_here: Any, caplog: Any
) -> None:
    terminal, screen = terminal_here(), Screen()
    display = panel(screen)
    shown(screen, display, 1)

    def gone(text: str) -> int:
        raise OSError(5, "Input/output error")

    terminal.write = gone
    shown(screen, display, 2)
    shown(screen, display, 3)
    display.close()
    assert [record.message for record in caplog.records] == [
        "standard output is gone (Input/output error): nothing is shown any more"
    ]
    assert sys.stdout is terminal


def test_a_terminal_of_few_rows_is_not_scrolled(terminal_here: Any) -> None:
    terminal = terminal_here()
    terminal.rows = 4
    screen = Screen()
    display = panel(screen)
    for step in range(1, 6):
        shown(screen, display, step)
    assert len(terminal.lines) <= terminal.rows
    display.close()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_what_cannot_be_drawn_on_is_no_screen(
    term: str, terminal_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal_here()
    assert Screen().is_there
    monkeypatch.setenv("TERM", term)
    assert not Screen().is_there
    monkeypatch.setenv("TERM", "xterm")
    latin = Terminal()
    latin.encoding = "latin-1"
    for other in (io.StringIO(), None, latin):
        monkeypatch.setattr(sys, "stdout", other)
        assert not Screen().is_there


def test_standard_error_in_a_file_stays_there(
    terminal_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = terminal_here()
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    screen = Screen()
    display = panel(screen)
    shown(screen, display, 1)
    print("a warning", file=sys.stderr)
    display.close()
    assert file.getvalue() == "a warning\n"
    assert "a warning" not in terminal.shown


def test_the_time_left_is_that_of_the_median_step(terminal_here: Any) -> None:
    """The first step takes a hundred times as long here, and says so of no other."""
    terminal_here()
    recent = panel(Screen())._recent
    for step, seconds in ((1, 200.0), (2, 2.0)):
        recent.note(values(step, seconds=seconds), step)
        assert not recent.left()
    recent.note(values(3, seconds=2.0), 3)
    assert recent.left() == about(2.0 * 997)


# ---------------------------------------------------------------- lines
def test_a_run_of_known_length_has_twenty_lines() -> None:
    said: list[str] = []
    lines = Lines(Run(40, 240, BUDGETS), said.append)
    for step in range(41, 241):
        lines.log(values(step), step)
    assert [int(line.split()[1].split("/")[0]) for line in said] == [41, *range(48, 241, 12)]
    assert said[0] == (
        "step 41/240 | loss 2.5000  8,192 tokens/s  500 ms/step  norm 1.25  lr 0.0003 | "
        "host 3.0 of 4.0 GiB  nvme 5.0 of 100.0 GiB | "
        "computing 68%  nvme 20%  update 10%  loop 2%"
    )
    assert " | nvme read 2 GB/s  nvme write 200 MB/s | host" in said[1]
    assert said[2].endswith(" | about 90 s left")


# ---------------------------------------------------------------- commands and names


def test_names_have_no_effect_on_a_terminal(capsys: Any) -> None:
    name = "a\x1b[2Jb[bold]c[/bold]"
    console = PlainConsole(file=io.StringIO(), width=80, force_terminal=True)
    table = Table("head")
    table.add_row(Text(name))
    for each in (name, Text(name), table, Group(name, Prose(name))):
        console.print(each)
    console.print(f"page: {name}", soft_wrap=True)
    echo(name)
    shown = console.file.getvalue() + capsys.readouterr().out
    assert shown.count(r"a\x1b[2Jb[bold]c[") == 7  # a table measures the name itself: cut there
    assert "\x1b[2J" not in shown
