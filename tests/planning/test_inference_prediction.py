"""What a dispatched model holds and moves is predicted before it: peaks of every tier, and the
bytes that each pass reads in the long run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.activations.trace import trace_activations
from offload.planning.machine.baseline import Baseline
from offload.planning.plan.estimate import Workload
from offload.planning.step.memory import PlannedMemory
from offload.planning.step.program import total_of
from offload.planning.step.step_time import step_traffic
from offload.tiers.tier import Tier
from offload.zero.groups.parameter_grouping import group_parameters

SETTLING, PASSES = 4, 20  # what stays in memory settles; those that count
MODEL = {"layers": 6, "hidden": 64, "heads": 4, "vocab": 512}
CASES: dict[str, dict[str, Any]] = {
    "all on nvme, the least": {"parameters": "nvme", "host": "160KiB"},
    "all on nvme, some room": {"parameters": "nvme", "host": "500KiB"},
    "half on host": {"parameters": {"host": "50%", "nvme": "50%"}, "host": "700KiB"},
    "left open": {"host": "600KiB"},
    "experts": {"parameters": "nvme", "host": "400KiB", "model": {"experts": 8}},
}


def _config(case: dict[str, Any], folder: Path) -> OffloadConfig:
    keys = {
        "device": "cpu", "precision": "bf16", "nvme": {"paths": [str(folder)]},
        "budget": {"host": case["host"], "nvme": "64MiB"},
        "train": {"model": {**MODEL, **case.get("model", {})}},
    }  # fmt: skip
    if "parameters" in case:
        keys["placement"] = {"parameters": case["parameters"]}
    return OffloadConfig.load(keys).for_inference()


@pytest.mark.sample("all on nvme, some room", "left open")
@pytest.mark.parametrize("name", CASES)
def test_peaks_and_bytes_of_a_pass_are_predicted(name: str, tmp_path: Path) -> None:
    config = _config(CASES[name], tmp_path)
    model = offload.dispatch(build_meta_model(config), config)
    workload = Workload(2, 24)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(512, (workload.batch, workload.sequence), generator=generator)
    with offload.dispatched(model) as dispatched:
        plan = dispatched.plan
        before = 0
        for number in range(SETTLING + PASSES):
            if number == SETTLING:
                before = dispatched.report().bytes_moved["nvme read"]
            with torch.no_grad():
                model(tokens)
        per_pass = (dispatched.report().bytes_moved["nvme read"] - before) / PASSES
        peaks = {t: dispatched.report().tiers[t].peak_nbytes for t in ("host", "nvme")}
    meta = build_meta_model(config).requires_grad_(False)
    shape = group_parameters(meta, config.groups.blocks).shape()
    facts = trace_activations(meta, config, workload, trains=False)
    estimate = PlannedMemory(plan, config, shape, facts, workload, Baseline(0)).estimate()
    assert peaks["nvme"] == estimate.ledger_peaks[Tier.NVME]
    assert peaks["host"] <= estimate.ledger_peaks[Tier.HOST]
    assert peaks["host"] == estimate.ledger_peaks[Tier.HOST] or Tier.HOST in estimate.bounds
    predicted = total_of(step_traffic(plan, config, shape, None, workload).moves).read
    assert predicted == pytest.approx(per_pass, rel=0.03)
