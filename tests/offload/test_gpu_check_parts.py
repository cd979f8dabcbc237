"""Parts of a GPU check that fail or hang, and tests that are run in shares: real processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from offload.bench import gpu_tests
from offload.bench.gpu_process import Status, run_command, run_part
from offload.bench.gpu_sizes import GIB
from offload.bench.gpu_tests import gpu_test_files, run_shares, shares_of

REPOSITORY = Path(__file__).parents[2]


# ---------------------------------------------------------------- parts
def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_part_that_answers_is_done(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    program = f"open({str(answer)!r}, 'w').write('{{\"found\": 3}}')"
    outcome = run_command("part", command(program), answer, 30, tmp_path)
    assert (outcome.status, outcome.result) == (Status.DONE, {"found": 3})


@pytest.mark.parametrize(
    ("program", "fragment"),
    [
        ("raise RuntimeError('no such kernel')", "RuntimeError: no such kernel"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("print('nothing to say')", "ended without an answer"),
        ("open('{answer}', 'w').write('[1]')", "its answer is a list"),
        ("open('{answer}', 'w').write('broken')", "its answer is no JSON"),
    ],
)
def test_a_part_that_fails_is_a_line(program: str, fragment: str, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    program = program.replace("{answer}", str(answer))
    outcome = run_command("part", command(program), answer, 30, tmp_path)
    assert outcome.status is Status.FAILED
    assert fragment in outcome.note


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('waiting for a device', flush=True)\n"
        "time.sleep(600)\n"
    )
    outcome = run_command("part", command(program), tmp_path / "answer", 2.0, tmp_path)
    assert outcome.status is Status.TIMED_OUT
    assert "did not end in 2 s" in outcome.note
    assert "waiting for a device" in outcome.note
    assert _is_gone(int(pid.read_text()))


def _is_gone(pid: int) -> bool:
    """Nobody may have reaped it yet where process 1 is no init: a zombie is gone, too."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_was_measured_before_it_hung_is_kept(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    program = (
        "import pathlib, time\n"
        "from offload.bench.gpu_process import leave_answer\n"
        f"leave_answer(pathlib.Path({str(answer)!r}), {{'found': 3}})\n"
        "time.sleep(600)\n"
    )
    outcome = run_command("part", command(program), answer, 5.0, tmp_path)
    assert (outcome.status, outcome.result) == (Status.TIMED_OUT, {"found": 3})


@pytest.mark.skipif(torch.cuda.is_available(), reason="fails only where there is no GPU")
def test_a_part_without_its_gpu_is_a_line(tmp_path: Path) -> None:
    outcome = run_part("kernels", {}, 120, tmp_path)
    assert outcome.status is Status.FAILED
    assert outcome.note.strip()


# ---------------------------------------------------------------- tests in shares
GPU_TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("number", range(7))
def test_good(number): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
"""


@pytest.mark.parametrize("shares", [1, 3])
def test_shares_cover_every_test_once(shares: int, tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(GPU_TESTS)
    tests = run_shares(tmp_path, [file], shares, 60, tmp_path)
    assert (tests.passed, tests.failed, tests.skipped, tests.broken) == (7, 1, 1, [])
    assert tests.skips == {"not today": 1}
    assert "one is not two" in tests.failures[0]
    assert "test_bad" in tests.failures[0]
    assert not tests.ok


def test_a_test_that_hangs_breaks_its_share_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "_HANG_S", 1)
    file = tmp_path / "test_some.py"
    hangs = "def test_hangs():\n    time.sleep(600)\n"
    file.write_text(GPU_TESTS.replace("def test_bad", hangs + "def test_bad"))
    tests = run_shares(tmp_path, [file], 2, 120, tmp_path)
    assert (tests.passed, tests.failed) == (4, 1)  # every other one: good 0, 2, 4, 6, and bad
    (broken,) = tests.broken
    assert "test_some.py::test_hangs" in broken


def test_tests_that_take_too_long_are_ended(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import time\ntime.sleep(600)\n")
    tests = run_shares(tmp_path, [file], 2, 1.0, tmp_path)
    assert len(tests.broken) == 2
    assert all(text.startswith("not done in 1 s") for text in tests.broken)


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import a_library_that_nobody_has\n")
    tests = run_shares(tmp_path, [file], 1, 60, tmp_path)
    assert not tests.ok
    assert "a_library_that_nobody_has" in json.dumps(tests.to_dict())


def test_no_test_that_ran_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(GPU_TESTS.replace("mark.gpu", "mark.skip(reason='no GPU')"))
    assert not run_shares(tmp_path, [file], 1, 60, tmp_path).ok


def test_the_files_with_gpu_tests_are_found() -> None:
    names = {path.name for path in gpu_test_files(REPOSITORY)}
    assert {"test_triton_optimizer.py", "test_triton_gradients.py", "test_gpu.py"} <= names
    assert "test_planner.py" not in names
    assert "test_config.py" not in names


def test_processes_are_as_many_as_cores_and_memory_allow() -> None:
    assert [shares_of(*pair) for pair in ((16, 139 * GIB), (4, 139 * GIB), (16, 8 * GIB))] == [
        8, 2, 2,
    ]  # fmt: skip
    assert shares_of(1, GIB) == 1
