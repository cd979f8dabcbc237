"""Parts of a GPU check that fail or hang, and the tests that it runs: real processes."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import PROGRAMS, Outcome, Status, run_part
from benchmarks.gpu_tests import run_files


# ---------------------------------------------------------------- parts
@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """How a part ends that runs these lines, with `parent` to be answered."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(PROGRAMS, "part", "a_part:run")

    def run(lines: str, limit_s: float = 60) -> Outcome:
        body = lines.replace("\n", "\n    ")
        (tmp_path / "a_part.py").write_text(f"def run(options, parent):\n    {body}\n")
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_part("part", {}, limit_s, folder)

    return run


@pytest.mark.parametrize(
    ("program", "fragment"),
    [
        ("raise RuntimeError('no such kernel')", "RuntimeError: no such kernel"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("print('nothing to say')", "ended without an answer"),
    ],
)
def test_a_part_that_fails_is_a_line(program: str, fragment: str, ended: Any) -> None:
    outcome = ended(program)
    assert outcome.status is Status.FAILED
    assert fragment in outcome.note.splitlines()[0]
    assert "nothing to say" in outcome.log or "nothing" not in program


def hung(ended: Callable[..., Outcome], program: str, sign: Path) -> Outcome:
    """How `program` ends, which writes the file `sign` before it hangs. A busy machine may take
    longer than the first limit to begin with it."""
    for limit_s in (2.0, 15.0, 120.0):
        outcome = ended(program, limit_s)
        if sign.exists():
            return outcome
    raise AssertionError(outcome)


def test_a_part_that_hangs_is_ended_with_all_that_it_started(ended: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('waiting for a device', flush=True)\n"
        f"file = open({str(pid)!r} + '.part', 'w')\n"
        "print(child.pid, file=file, flush=True)\n"
        f"import os; os.rename(file.name, {str(pid)!r})\n"
        "time.sleep(600)\n"
    )
    outcome = hung(ended, program, pid)
    assert outcome.status is Status.TIMED_OUT
    assert f"did not end in {outcome.limit_s:.0f} s" in outcome.note
    assert "waiting for a device" in outcome.log
    assert _is_gone(int(pid.read_text()))


def _is_gone(pid: int) -> bool:
    """A zombie is gone, too: it may not have been reaped yet where process 1 is no init."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_was_measured_before_it_hung_is_kept(ended: Any, tmp_path: Path) -> None:
    sign = tmp_path / "answered"
    program = (
        f"import time\nparent.answer({{'found': 3}})\nopen({str(sign)!r}, 'w').close()\n"
        "time.sleep(600)"
    )
    outcome = hung(ended, program, sign)
    assert (outcome.status, outcome.result) == (Status.TIMED_OUT, {"found": 3})


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="fails only where there is no GPU")
def test_a_part_without_its_gpu_is_a_line(tmp_path: Path) -> None:
    outcome = run_part("inference", {}, 120, tmp_path)
    assert outcome.status is Status.FAILED
    assert outcome.note.strip()


# ---------------------------------------------------------------- the tests of the device
GPU_TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
def test_good(number): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_test_is_counted_once_and_a_failure_is_named(processes: int, tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(GPU_TESTS)
    tests = run_files(tmp_path, [file], processes, 60, tmp_path)
    assert sorted(tests["counts"].split(", ")) == ["1 failed", "1 skipped", "3 passed"]
    ((failed, why),) = tests["failed"].items()
    assert failed == "test_some.py::test_bad"
    assert "one is not two" in why
    assert tests["skipped"] == {"Skipped: not today": 1}
    assert not tests["unreached"]
    assert not tests["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "limit_s", "fragment"),
    [
        ("import a_library_that_nobody_has\n", 60.0, "a_library_that_nobody_has"),
        ("import os\nos._exit(7)\n", 60.0, "pytest ended with status 7"),
        (
            f"{GPU_TESTS}def test_hung(): time.sleep(600)\n",
            20.0,
            '"not_ended": ["test_some.py::test_hung"]',
        ),
    ],
)
def test_tests_that_do_not_get_to_their_end_are_named(
    text: str, limit_s: float, fragment: str, tmp_path: Path
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(text)
    tests = run_files(tmp_path, [file], 1, limit_s, tmp_path)
    assert not tests["ok"]
    assert fragment in json.dumps(tests)
