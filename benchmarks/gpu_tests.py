"""The tests that need a GPU, in one run of pytest, and what became of them.

GPU tests wait for compilers most of the time, so pytest-xdist, where it
is installed, runs several processes side by side.

pytest loads this module as a plugin, too, which keeps the outcome of each test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offload.process import machine
from offload.process.child import Parent, child_environment, repository
from offload.tiers import accelerator
from offload.tiers.errors import PathError

_MAX_PROCESSES = 8
_DEVICE_NBYTES = 3 << 30  # per process: a context, and tests that take a gigabyte
_SHOWN_CHARACTERS = 400
_SHOWN_LINES = 20
_FOLDER = "OFFLOAD_GPU_TESTS"  # of the plugin's files: all tests, outcomes
_ENVIRONMENT = {
    "OFFLOAD_TEST_DEVICE": "cuda",  # of the engines in tests that run on either
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else two runs of one product may differ
    "OMP_NUM_THREADS": "1",
}
_HANG_S = 60  # a test that takes longer is shown with its stacks, and ends its process


def gpu_test_files(root: Path) -> list[Path]:
    """Test modules that can have GPU tests: those that name the marker or what gives it to them.

    The others are not even imported: an interpreter that is used as it is may lack their imports.
    """
    modules = sorted((root / "tests").glob("**/test_*.py"))
    marks = ("mark.gpu", "MARKS", "on_a_gpu_too", "triton_device")
    return [path for path in modules if any(mark in path.read_text() for mark in marks)]


def run_tests(options: Mapping[str, Any], parent: Parent) -> None:
    """Run the tests as a child's program. PathError where no tests are beside the package."""
    root = repository()
    files = gpu_test_files(root)
    if not files:
        raise PathError(f"{root} has no GPU tests; run this in a checkout of the project")
    room = accelerator.free_nbytes(accelerator.default_device()) // _DEVICE_NBYTES
    processes = max(1, min(_MAX_PROCESSES, machine.cpu_count() // 2, room))
    if importlib.util.find_spec("xdist") is None:
        processes = 1
    limit_s, folder = options["limit_s"], Path(options["folder"])
    result = run_files(root, files, processes, limit_s, folder)
    parent.answer(result | {"processes": processes})


def run_files(
    root: Path, files: Sequence[Path], processes: int, limit_s: float, folder: Path
) -> dict[str, Any]:
    """Run the GPU tests of `files` that are not slow.

    Returns whether none failed and at least one passed (`ok`), their `counts`, a line for each that
    `failed`, reasons of skips, and the tests that were not reached or not ended in time; in `said`
    the end of pytest's output where something else ended it.
    """
    log, own = folder / "tests.log", folder / "outcomes"
    own.mkdir()
    command = [
        sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow", "-p", "no:cacheprovider",
        "-p", "no:benchmark",  # it would warn beside xdist, and a warning is a failure
        "-p", "benchmarks.gpu_tests", "--continue-on-collection-errors",
        "-rfE", "--tb=short", *(["-n", str(processes)] if processes > 1 else []),
        "-o", f"faulthandler_timeout={_HANG_S}", "-o", "faulthandler_exit_on_timeout=true",
        # libraries are those that are there, not those that were pinned: what they announce for
        # later versions is no failure here
        "-W", "default::DeprecationWarning", "-W", "default::PendingDeprecationWarning",
        "-W", "default::FutureWarning", *map(str, files),
    ]  # fmt: skip
    environ: dict[str, str] = {**child_environment(), **_ENVIRONMENT, _FOLDER: str(own)}
    environ.pop("TRITON_INTERPRET", None)  # on the device
    code = None
    with log.open("w") as output, suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, timeout=limit_s, check=False,
        ).returncode  # fmt: skip
    result = _outcomes(own)
    result["ok"] = not result["failed"] and "passed" in result["counts"]
    if code not in (None, 0, 1):  # None: the time was up; 1: some failed
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        ended = f"pytest ended with status {code}"
        shown = [line[:_SHOWN_CHARACTERS] for line in lines[-_SHOWN_LINES:]]
        return result | {"ok": False, "said": [ended, *shown]}
    return result


def _outcomes(folder: Path) -> dict[str, Any]:
    """What the plugin wrote."""
    ended: dict[str, tuple[str, str]] = {}
    begun: dict[str, None] = {}
    reports, listed = folder / "reports", folder / "all"
    for line in reports.read_text().splitlines() if reports.is_file() else ():
        test, outcome, why = json.loads(line)
        if outcome == "begun":
            begun[test] = None
        elif ended.get(test, ("", ""))[0] != "failed":
            ended[test] = outcome, why
    tests = json.loads(listed.read_text()) if listed.is_file() else []
    failed = {test: why for test, (outcome, why) in ended.items() if outcome == "failed"}
    left = [test for test in tests if test not in {*ended, *begun}]
    counts = Counter(outcome for outcome, _ in ended.values())
    return {
        "counts": ", ".join(f"{number} {outcome}" for outcome, number in counts.items()),
        "failed": failed, "said": [], "unreached": _by_file(left, tests),
        "not_ended": [test for test in begun if test not in ended],
        "skipped": dict(Counter(why for outcome, why in ended.values() if outcome == "skipped")),
    }  # fmt: skip


def _by_file(left: Sequence[str], tests: Sequence[str]) -> list[str]:
    """The tests that are left; a file, where all of its tests are."""
    here, there = (Counter(map(_file_of, each)) for each in (tests, left))
    whole = [file for file, number in there.items() if number == here[file]]
    return [*whole, *(test for test in left if _file_of(test) not in whole)]


def _file_of(test: str) -> str:
    return test.split("::")[0]


# ---------------------------------------------------------------- as a plugin of pytest
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """List all tests."""
    folder = Path(os.environ[_FOLDER])
    new = folder / f"all-{os.getpid()}"  # of several processes, each with the same list
    new.write_text(json.dumps([item.nodeid for item in items]))
    new.replace(folder / "all")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _note(report.nodeid, report.outcome, _why(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(report.nodeid, "failed", _why(report))


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return report.longreprtext.strip()[-_SHOWN_CHARACTERS:]


def _note(test: str, outcome: str, why: str = "") -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # their controller is told everything
        with (Path(os.environ[_FOLDER]) / "reports").open("a") as file:
            file.write(json.dumps([test, outcome, why]) + "\n")
