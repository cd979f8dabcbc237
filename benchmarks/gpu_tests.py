"""The tests that need a GPU, in one run of pytest, and what became of them.

GPU tests wait for compilers most of the time, so pytest-xdist, where it is installed, runs several
processes side by side.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.process import machine
from offload.process.child import Parent, child_environment, repository
from offload.tiers import accelerator
from offload.tiers.errors import PathError

_MAX_PROCESSES = 8
_DEVICE_NBYTES = 3 << 30  # per process: a context, and tests that take a gigabyte
_SHOWN_CHARACTERS = 400
_SHOWN_LINES = 20
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
    result = run_files(root, files, processes, options["limit_s"], Path(options["folder"]))
    parent.answer(result | {"processes": processes})


def run_files(
    root: Path, files: Sequence[Path], processes: int, limit_s: float, folder: Path
) -> dict[str, Any]:
    """Run the GPU tests of `files` that are not slow. Return whether all passed and there was at
    least one (`ok`), and what pytest says: its counts, and a line for each failure and each reason
    of a skip; the end of its output where it did not get to its end."""
    log = folder / "tests.log"
    command = [
        sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow", "-p", "no:cacheprovider",
        "-p", "no:benchmark",  # it would warn beside xdist, and a warning is a failure
        "-rfEs", "--tb=short", *(["-n", str(processes)] if processes > 1 else []),
        "-o", f"faulthandler_timeout={_HANG_S}", "-o", "faulthandler_exit_on_timeout=true",
        # libraries are those that are there, not those that were pinned: what they announce for
        # later versions is no failure here
        "-W", "default::DeprecationWarning", "-W", "default::PendingDeprecationWarning",
        "-W", "default::FutureWarning", *map(str, files),
    ]  # fmt: skip
    environ: dict[str, str] = {**child_environment(), **_ENVIRONMENT}
    environ.pop("TRITON_INTERPRET", None)  # on the device
    ended = f"not done in {limit_s:.0f} s"
    code = None
    with log.open("w") as output, suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, timeout=limit_s, check=False,
        ).returncode  # fmt: skip
        ended = f"pytest ended with status {code}"
    text = log.read_text(errors="replace")
    lines = [line[:_SHOWN_CHARACTERS] for line in text.splitlines() if line.strip()]
    if code not in (0, 1):  # 0: all passed; 1: some failed
        return {"ok": False, "counts": ended, "said": lines[-_SHOWN_LINES:]}
    counts = lines[-1].strip("= ")
    said = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "SKIPPED ["))]
    return {"ok": code == 0 and " passed" in counts, "counts": counts, "said": said[:_SHOWN_LINES]}
