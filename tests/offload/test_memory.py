"""The budget is a promise: measured peaks of whole processes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.offload.engine_cases import NVME, said_by

PROGRAM = Path(__file__).with_name("memory_program.py")
HOST_MIB = 128
MIB = 1 << 20


@cache
def measured(layers: int, folder: Path) -> Any:
    config = {
        "budget": {"host": f"{HOST_MIB}MiB", "nvme": "4GiB"}, "nvme": {"paths": [str(folder)]},
        "placement": {**NVME, "activations": {"tier": "device", "checkpoint": True}},
        "optimizer": {"chunk": 262144},
        "train": {"model": {"layers": layers, "hidden": 512, "heads": 8, "mlp": 1536}},
    }  # fmt: skip
    return said_by(PROGRAM, json.dumps(config), "1", "16")


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


@pytest.mark.slow
def test_peak_rss_does_not_grow_with_the_number_of_layers(folder):
    few, many = measured(4, folder), measured(12, folder)
    assert many["states"] - few["states"] > 300 * MIB
    assert many["peak"] - few["peak"] < 24 * MIB
