"""The framework's own memory: measured once, kept, and a default that says that it is one."""

import sys
from pathlib import Path

import pytest

from offload.planning.machine import baseline
from offload.planning.machine.baseline import (
    GPU_CONTEXT_NBYTES,
    Baseline,
    known_baseline,
    machine_baseline,
    measure_baseline,
)
from offload.tiers.errors import OffloadError
from offload.tools.memest.estimate.shortfalls import baseline_note


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "offload" / "baseline"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Precisions that were measured; each measurement gives other figures."""
    asked: list[str] = []

    def measure(precision: str) -> Baseline:
        asked.append(precision)
        n = len(asked)
        return Baseline(1000 * n, 0, True, 20 * n)

    monkeypatch.setattr(baseline, "measure_baseline", measure)
    return asked


def test_without_a_measurement_the_default_says_that_it_is_one() -> None:
    baseline = known_baseline("bf16")
    assert not baseline.measured
    assert "a default" in baseline_note(baseline)


def test_a_measurement_is_made_once_per_precision_and_kept(measurements: list[str]) -> None:
    first = machine_baseline("bf16")
    assert machine_baseline("bf16") == first == known_baseline("bf16")
    assert first.measured
    assert (first.ram_nbytes, first.compiler_nbytes) == (1000, 20)
    assert machine_baseline("fp32").ram_nbytes == 2000
    assert measurements == ["bf16", "fp32"]
    assert machine_baseline("bf16", remeasure=True).ram_nbytes == 3000


def test_what_a_gpu_holds_beside_the_budget_is_said_with_its_source() -> None:
    baseline = known_baseline("bf16", gpu=True)
    assert baseline.gpu_nbytes == GPU_CONTEXT_NBYTES + (64 << 20)
    assert "cuBLAS's workspaces (Hopper's default)" in baseline_note(baseline)


def test_a_measurement_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OffloadError, match="nowhere"):
        measure_baseline("bf16")
