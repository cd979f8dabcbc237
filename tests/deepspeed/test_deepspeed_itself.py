"""The same program, run by DeepSpeed and with its import changed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("one_loop.py")


def rows(name: str, stage: int) -> list[list[float]]:
    """Losses, norms and learning rates."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), name, str(stage)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ":".join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("rows ")]
    return json.loads(line.removeprefix("rows "))


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_norms_and_rates_are_deepspeeds(stage: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    theirs, offloads = rows("deepspeed", stage), rows("offload.deepspeed", stage)
    for expected, actual in zip(theirs, offloads, strict=True):
        assert actual == pytest.approx(expected, rel=2e-5, abs=1e-7)


@pytest.mark.slow
def test_the_program_runs_with_its_import_changed() -> None:
    assert len(rows("offload.deepspeed", 3)) == 12
