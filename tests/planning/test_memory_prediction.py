"""What memory a run takes is predicted before it: held against the ledger and against the process.

nvme's peak is a matter of the moment (how many new versions are on their way); the prediction is
the most it can come to, and is held to that.
Where gradients on nvme are used up within backward, the host's peak may be off by those of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.gpt import build_meta_model
from offload.planning.machine.baseline import Baseline, machine_baseline
from offload.planning.step.memory import checkpoint_nbytes
from offload.tiers.tier import TIERS, Tier
from tests.planning.memory_cases import Case, Predicted, draw, measure, predict

LEDGER, RSS = 0.03, 0.08  # most that a prediction is off
FAST = {"tiny": 1}
FAST_RSS = {"small": 1}  # whose ledger is judged, too
LONG = {"tiny": 10, "small": 12, "60M": 10, "151M": 6, "300M": 4}
# `fragmentation_nbytes` was fitted to the RAM of those above; these it has not seen.
HELD_OUT = {"small": 4, "60M": 4, "151M": 3, "300M": 1}
LONG_CASES = [(size, seed) for size, count in LONG.items() for seed in range(count)]
LONG_CASES += [(size, 100 + seed) for size, count in HELD_OUT.items() for seed in range(count)]


@dataclass(frozen=True)
class Row:
    """One measured case. Errors are shares of what was measured."""

    case: Case
    tier: dict[str, float]
    rss: float | None
    nvme_is_bound: bool

    def exact(self) -> dict[str, float]:
        """Errors of the tiers whose peaks do not depend on the moment."""
        return {t: e for t, e in self.tier.items() if t != "nvme" or not self.nvme_is_bound}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swap")


def test_ledger_peaks_are_predicted(folder: Path) -> None:
    cases = list(_drawn(FAST, folder))
    pairs = zip(cases, measure(cases), strict=True)
    _judge([_row(case, predict(case, Baseline(0), activations=False), m) for case, m in pairs])


@pytest.mark.slow
def test_peak_ram_is_predicted(folder: Path) -> None:
    _judge([_fresh(case) for case in _drawn(FAST_RSS, folder)])


@pytest.mark.slow  # all of them take many minutes
@pytest.mark.parametrize(("size", "seed"), LONG_CASES)
def test_drawn_cases_up_to_300_million_parameters(size: str, seed: int, folder: Path) -> None:
    _judge([_fresh(draw(size, seed, folder))])


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(3))
def test_the_size_of_a_checkpoint_is_predicted(number: int, tmp_path: Path) -> None:
    case = draw("tiny", 100 + number, tmp_path)
    config = case.loaded()
    with offload.initialize(build_meta_model(config), config) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
        files = (tmp_path / "checkpoint").rglob("*")
        written = sum(file.stat().st_size for file in files if file.is_file())
        predicted = checkpoint_nbytes(engine.plan, config, case.shape())
    assert predicted == pytest.approx(written, rel=0.01)


def _drawn(sizes: dict[str, int], folder: Path) -> Iterator[Case]:
    return (draw(size, seed, folder) for size, count in sizes.items() for seed in range(count))


def _fresh(case: Case) -> Row:
    """Measured in a process of its own."""
    baseline = machine_baseline(case.loaded().precision)
    return _row(case, predict(case, baseline, activations=True), measure([case])[0], ram=True)


def _row(case: Case, predicted: Predicted, measured: dict[str, Any], *, ram: bool = False) -> Row:
    tiers, peaks = measured["tiers"], predicted.memory.ledger_peaks
    errors = {
        str(tier): peaks[tier] / tiers[str(tier)] - 1
        if tiers[str(tier)]
        else math.inf
        if peaks[tier]
        else 0.0
        for tier in TIERS
    }
    if predicted.host_slack_nbytes and tiers["host"]:
        slack = predicted.host_slack_nbytes / tiers["host"]
        errors["host"] = math.copysign(max(0.0, abs(errors["host"]) - slack), errors["host"])
    place = predicted.memory.places[Tier.HOST]
    rss = place.peak_nbytes / measured["rss"] - 1 if ram else None
    return Row(case, errors, rss, Tier.NVME in predicted.memory.bounds)


def _judge(rows: list[Row]) -> None:
    """Refuse what is off by too much."""
    off = [row for row in rows if any(abs(e) > LEDGER for e in row.exact().values())]
    off += [row for row in rows if abs(row.rss or 0.0) > RSS]
    off += [row for row in rows if row.nvme_is_bound and row.tier["nvme"] < 0]
    assert not off, off
