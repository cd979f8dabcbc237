"""The tests that need a GPU, in one run of pytest, and what became of them.

GPU tests wait for compilers most of the time, so pytest-xdist, where it is installed, runs several
processes side by side.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offload.process import machine
from offload.process.child import Parent, child_environment, repository
from offload.tiers import accelerator
from offload.tiers.errors import PathError

_MOST_PROCESSES = 8
_DEVICE_NBYTES = 3 << 30  # per process: a context, and tests that take a gigabyte
_SHOWN_CHARACTERS = 400
_SHOWN_FAILURES = 20
_ENVIRONMENT = {
    "OFFLOAD_TEST_DEVICE": "cuda",  # of the engines in tests that run on either
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else two runs of one product may differ
    "OMP_NUM_THREADS": "1",
}
_HANG_S = 60  # a test that takes longer is shown with its stacks, and ends its process
_ENDED = (0, 1)  # pytest's status: all passed, some failed


@dataclass
class Tests:
    """Counts of test cases, and messages about those that did not pass."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)  # reason -> cases
    broken: list[str] = field(default_factory=list)  # why pytest did not get to its end

    @property
    def ok(self) -> bool:
        """Whether all tests passed, and there was at least one."""
        return self.passed > 0 and not self.failed and not self.broken

    def add_report(self, report: Path) -> None:
        """Count the results of a JUnit report of pytest."""
        for case in ET.parse(report).getroot().iter("testcase"):
            wrong = [found for kind in ("failure", "error") for found in case.findall(kind)]
            skip = case.find("skipped")
            if wrong:
                self.failed += 1
                name = f"{case.get('classname', '')}::{case.get('name', '')}"
                self.failures.append(f"{name}: {_what(wrong[0])[:_SHOWN_CHARACTERS]}")
            elif skip is not None:
                self.skipped += 1
                reason = skip.get("message") or "no reason given"
                self.skips[reason] = self.skips.get(reason, 0) + 1
            else:
                self.passed += 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failures": self.failures[:_SHOWN_FAILURES], "ok": self.ok}


def gpu_test_files(root: Path) -> list[Path]:
    """Test modules that can have GPU tests: those that name the marker or what gives it to them.

    The others are not even imported: an interpreter that is used as it is may lack their imports.
    """
    found = sorted((root / "tests").glob("**/test_*.py"))
    marks = ("mark.gpu", "MARKS", "on_a_gpu_too", "triton_device")
    return [path for path in found if any(mark in path.read_text() for mark in marks)]


def run_tests(options: Mapping[str, Any], parent: Parent) -> None:
    """Run the tests as a child's program. PathError where no tests are beside the package."""
    root = repository()
    files = gpu_test_files(root)
    if not files:
        raise PathError(f"{root} has no GPU tests; run this in a checkout of the project")
    room = accelerator.free_nbytes(accelerator.default_device()) // _DEVICE_NBYTES
    processes = max(1, min(_MOST_PROCESSES, machine.cpu_count() // 2, room))
    if importlib.util.find_spec("xdist") is None:
        processes = 1
    tests = run_files(root, files, processes, options["limit_s"], Path(options["folder"]))
    parent.answer(tests.to_dict() | {"processes": processes})


def run_files(
    root: Path, files: Sequence[Path], processes: int, limit_s: float, folder: Path
) -> Tests:
    """Run the GPU tests of `files` that are not slow; a test that hangs is reported."""
    report, log = folder / "tests.xml", folder / "tests.log"
    command = [
        sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow", "-p", "no:cacheprovider",
        "-p", "no:benchmark",  # it would warn beside xdist, and a warning is a failure
        f"--junitxml={report}", *(["-n", str(processes)] if processes > 1 else []),
        "-o", f"faulthandler_timeout={_HANG_S}", "-o", "faulthandler_exit_on_timeout=true",
        # libraries are those that are there, not those that were pinned: what they announce for
        # later versions is no failure here
        "-W", "default::DeprecationWarning", "-W", "default::PendingDeprecationWarning",
        "-W", "default::FutureWarning", *map(str, files),
    ]  # fmt: skip
    environ: dict[str, str] = {**child_environment(), **_ENVIRONMENT}
    environ.pop("TRITON_INTERPRET", None)  # on the device
    tests = Tests()
    try:
        with log.open("w") as output:
            code = subprocess.run(
                command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        tests.broken.append(f"not done in {limit_s:.0f} s, at: {_last_test(log)}")
        return tests
    if report.is_file():
        tests.add_report(report)
    if code not in _ENDED or not report.is_file():
        tests.broken.append(f"pytest ended with status {code}, at: {_last_test(log)}")
    return tests


def _what(wrong: ET.Element) -> str:
    """The error in one line: the message, or for want of one what pytest marks with E."""
    marked = [line[1:].strip() for line in (wrong.text or "").splitlines() if line[:2] == "E "]
    said = (wrong.get("message") or "").strip()
    return " | ".join(dict.fromkeys(text for text in (said, *marked[-1:]) if text))


def _last_test(log: Path) -> str:
    """The test that a process was at; if it reached none, the last line of its output."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "::" in line]
    return [*lines[-1:], *named][-1].strip()[:_SHOWN_CHARACTERS] if lines else "(no output)"
