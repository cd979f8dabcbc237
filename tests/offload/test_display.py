"""What is printed of steps, names without effect on a terminal, and what loggers get and write."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from offload.display.console import PlainConsole, Prose
from offload.display.plain_text import echo
from offload.display.training import Lines, Run
from offload.display.words import about
from offload.errors import ConfigError
from offload.loggers import JSONLinesLogger, closing_all, loggers_of
from offload.runs.metrics import MetricsFile, StepMetrics


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


def test_the_time_left_is_that_of_the_median_step() -> None:
    """The first step takes a hundred times as long here, and says so of no other."""
    said: list[str] = []
    lines = Lines(Run(0, 1000, BUDGETS), said.append, every=1)
    for step, seconds in ((1, 200.0), (2, 2.0), (3, 2.0)):
        lines.log(values(step, seconds=seconds), step)
    assert [line.endswith(" left") for line in said] == [False, False, True]
    assert said[-1].endswith(f" | {about(2.0 * 997)}")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_terminal_that_is_closed_does_not_end_the_training(code: int, caplog: Any) -> None:
    """A full disk does."""

    def gone(line: str) -> None:
        raise OSError(code, "")

    lines = Lines(Run(0, 1000, BUDGETS), gone, every=1)
    if code != errno.EIO:
        with pytest.raises(OSError, match=str(code)):
            lines.log(values(1), 1)
        return
    for step in (1, 2):
        lines.log(values(step), step)
    assert [record.message for record in caplog.records] == [
        "the terminal is gone: no steps are shown any more"
    ]


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


def test_no_step_waits_for_a_file_that_takes_its_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for a reader
    logger = JSONLinesLogger(path)
    for step in (1, 2):
        logger.log(values(step), step)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    logger.close()
    assert [json.loads(line)["step"] for line in os.read(reader, 1 << 16).splitlines()] == [1, 2]
    os.close(reader)


def test_a_line_that_cannot_be_written_is_an_error_of_a_later_call(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "folder" / "lines")
    logger.log(values(1), 1)
    logger.flush()
    (tmp_path / "folder").rename(tmp_path / "gone")
    logger.log(values(2), 2)
    with pytest.raises(FileNotFoundError, match="folder"):
        logger.close()
    assert len((tmp_path / "gone" / "lines").read_text().splitlines()) == 1


def test_a_figure_that_is_not_finite_takes_no_step_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing_all([logger := MetricsFile(path)]):
        logger.log(values(1, figures={"reward": math.nan, "accuracy": 0.5}), 1)
    MetricsFile(path).begin(steps_done=1)
    (read,) = MetricsFile(path).read()
    assert read["figures"] == {"reward": None, "accuracy": 0.5}


def test_anything_that_can_be_called_or_logs_is_a_logger() -> None:
    told: list[Any] = []

    class Mine:
        def log(self, values: Any, step: int) -> None:
            told.append(("mine", step))

    def called(values: dict[str, Any], step: int) -> None:
        values.clear()  # of its own
        told.append(("called", step))

    given = values(7)
    for logger in loggers_of([Mine(), called]):
        logger.log(given, 7)
    assert told == [("mine", 7), ("called", 7)]
    assert given == values(7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (print, "is not a list; put it into one"),
        ("wandb", "is not a list"),
        (["wandb"], "a str has no method log"),
        ([JSONLinesLogger], "JSONLinesLogger is a class; make one of it"),
        ([3], r"a int has no method log\(values, step\)"),
        ([{}], "a dict has no method"),
    ],
)
def test_what_is_no_logger_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loggers_of(given)


def test_all_loggers_are_closed_where_one_of_them_fails(tmp_path: Path) -> None:
    closed = []

    class Failing:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, values: Any, step: int) -> None:
            raise AssertionError

        def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    with pytest.raises(OSError, match="first"), closing_all([Failing("first"), Failing("second")]):
        pass
    assert closed == ["second", "first"]


def test_what_a_killed_program_left_of_a_line_spoils_no_other(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    for step in (1, 2, 3):
        with closing_all([logger := JSONLinesLogger(lines)]):
            logger.log(values(step), step)
        if step == 2:
            lines.write_bytes(lines.read_bytes()[:-3])
    whole = [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}}")]
    assert [each["step"] for each in whole] == [1, 3]
    assert [each["step"] for each in MetricsFile(lines).read()] == [1, 3]
