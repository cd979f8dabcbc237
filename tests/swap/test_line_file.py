"""Lines that are added to a file beside the training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.swap.io.line_file import LineFile
from offload.tiers.errors import StateError


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[LineFile]:
    lines = LineFile(tmp_path / "lines")
    yield lines
    lines.close()


def test_lines_are_added_in_order_to_what_is_there(lines: LineFile) -> None:
    lines.path.write_text("before\n")
    for number in range(300):
        lines.append(str(number))
    lines.flush()
    assert lines.path.read_text().split() == ["before", *map(str, range(300))]
    lines.append("after")
    lines.close()
    assert lines.path.read_text().endswith("299\nafter\n")


def test_nobody_waits_for_a_file_that_takes_its_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for a reader
    lines = LineFile(path)
    lines.append("one")
    lines.append("two")  # came here: neither was waited for
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lines.close()
    assert os.read(reader, 100) == b"one\ntwo\n"
    os.close(reader)


def test_a_line_that_cannot_be_written_is_an_error_of_the_next_call(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "missing" / "lines")
    lines.append("lost")
    with pytest.raises(FileNotFoundError, match="missing"):
        lines.flush()
    (tmp_path / "missing").mkdir()
    lines.append("kept")
    lines.close()
    assert lines.path.read_text() == "kept\n"


def test_closing_tells_of_what_was_lost_and_ends_the_thread(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "missing" / "lines")
    lines.append("lost")
    with pytest.raises(FileNotFoundError):
        lines.close()
    lines.close()
    assert not lines._thread.is_alive()
    with pytest.raises(StateError, match="is closed"):
        lines.append("late")
