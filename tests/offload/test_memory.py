"""The budget is a promise: measured peaks of whole processes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from offload.child import child_environment

PROGRAM = Path(__file__).with_name("memory_program.py")
HOST_MIB = 128
MIB = 1 << 20


@cache
def measured(layers: int, folder: Path) -> dict[str, int]:
    out = subprocess.run(
        [sys.executable, str(PROGRAM), str(layers), str(HOST_MIB), str(folder)],
        capture_output=True, text=True, timeout=240, cwd=PROGRAM.parents[2],
        env={
            "PYTHONPATH": child_environment()["PYTHONPATH"], "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",  # several would mostly wait for each other
        },
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    result: dict[str, int] = json.loads(out.stdout)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvme")


def test_peak_rss_stays_within_baseline_and_host_budget(folder):
    run = measured(12, folder)
    assert run["states"] > 4 * run["budget"]  # the states could not have been held
    assert run["peak"] <= (run["baseline"] + run["budget"]) * 1.05


def test_the_ledger_never_exceeds_its_budget(folder):
    run = measured(12, folder)
    assert run["ledger_peak"] <= run["budget"] == HOST_MIB * MIB


def test_peak_rss_does_not_grow_with_the_number_of_layers(folder):
    few, many = measured(4, folder), measured(12, folder)
    assert many["states"] - few["states"] > 300 * MIB
    assert many["peak"] - few["peak"] < 24 * MIB
