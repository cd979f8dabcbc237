"""An engine in a memory cgroup that another process fills: killed by the kernel, or guarded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.process import machine
from offload.process.child import child_environment

PROGRAM = Path(__file__).with_name("memory_program.py")
MOST = 3 << 30  # of memory that all of it takes
MEAL = "400"  # MiB, 70 more than the program's limit leaves


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new one inside this process's."""
    if machine.available_memory_nbytes() < MOST:
        pytest.skip("the machine has too little memory")
    folder = next(machine.cgroup_folders("memory"), None)
    if folder is None:
        pytest.skip("there is no memory cgroup")
    made = folder / f"offload-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not any((made / f"memory.{name}").exists() for name in ("limit_in_bytes", "max")):
            pytest.skip(f"{made} has no controller for memory")
        yield made
    finally:
        until = time.monotonic() + 10
        while made.exists():
            try:
                made.rmdir()
            except OSError:  # killed processes take a moment to go
                assert time.monotonic() < until
                time.sleep(0.05)


def train(cgroup: Path, folder: Path, *how: str) -> tuple[int, list[dict[str, Any]], str]:
    """What it ended with, what it said, and what it logged."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(cgroup), str(folder), *how],
        capture_output=True, text=True, timeout=400, cwd=PROGRAM.parents[2],
        env={**child_environment(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_run_whose_cgroup_another_process_fills_goes_on_and_ends_with_an_error_before_the_kernel(
    cgroup: Path, tmp_path: Path, long: bool
) -> None:
    if not long:  # on a busy machine the other process may eat before anybody looks
        pytest.skip("--long")
    code, said, logged = train(cgroup, tmp_path, "guarded", MEAL, "all")
    assert code == 0, logged
    first, fed, refused, *after = said
    assert len(fed["losses"]) == len(first["losses"])
    assert "of copies given back for others" in fed["report"]
    assert logged.count("copies of states give up room") == 1, logged
    assert "the kernel may kill this process, and no copies are left" in refused["error"]
    assert "manifest.json" in refused["saved"]
    assert after[-1]["after"] is None  # there is no limit any more
    code, alone, _ = train(cgroup, tmp_path, "alone", MEAL)
    assert code == -9
    assert alone == [{**first, "rss": alone[0]["rss"]}]
