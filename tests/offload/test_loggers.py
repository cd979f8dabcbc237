"""Loggers: what they are given, and the files that they make."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.loggers import JSONLinesLogger, closing_all, loggers_of
from offload.runs.metrics import MetricsFile, StepMetrics


def row(step: int, **changed: Any) -> dict[str, Any]:
    values = StepMetrics(
        step=step, loss=1.0 / step, lr=0.1, seconds=0.5, tokens_per_second=10.0, gradient_norm=2.0,
        skipped_steps=0, rss_nbytes=5, tiers={"host": 3, "nvme": 4},
        moved={"nvme read": step << 30}, waited={"nvme": 0.125}, elapsed_seconds=0.5 * step,
    ).values()  # fmt: skip
    return {**values, **changed}


def test_no_step_waits_for_a_file_that_takes_its_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for a reader
    logger = JSONLinesLogger(path)
    for step in (1, 2):
        logger.log(row(step), step)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    logger.close()
    assert [json.loads(line)["step"] for line in os.read(reader, 1 << 16).splitlines()] == [1, 2]
    os.close(reader)


def test_a_line_that_cannot_be_written_is_an_error_of_a_later_call(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "folder" / "lines")
    logger.log(row(1), 1)
    logger.flush()
    (tmp_path / "folder").rename(tmp_path / "gone")
    logger.log(row(2), 2)
    with pytest.raises(FileNotFoundError, match="folder"):
        logger.close()
    assert len((tmp_path / "gone" / "lines").read_text().splitlines()) == 1


def test_a_figure_that_is_not_finite_takes_no_step_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing_all([logger := MetricsFile(path)]):
        logger.log(row(1, figures={"reward": math.nan, "accuracy": 0.5}), 1)
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

    values = row(7)
    for logger in loggers_of([Mine(), called]):
        logger.log(values, 7)
    assert told == [("mine", 7), ("called", 7)]
    assert values == row(7)


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
            logger.log(row(step), step)
        if step == 2:
            lines.write_bytes(lines.read_bytes()[:-3])
    whole = [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}}")]
    assert [each["step"] for each in whole] == [1, 3]
    assert [each["step"] for each in MetricsFile(lines).read()] == [1, 3]
