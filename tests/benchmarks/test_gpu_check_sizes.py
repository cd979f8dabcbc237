"""What `make gpu-check` trains on which machine, and what bounds its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.gpu_sizes import GIB, TRAININGS, case_of
from benchmarks.gpu_step import bounds
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.tiers.tier import Tier
from offload.zero.groups.parameter_grouping import group_parameters
from tests.benchmarks.gpu_check_cases import H200, MACHINES, planned, solved_once

__all__ = ["solved_once"]


def test_what_a_machine_cannot_hold_is_left_out_with_the_planners_reason() -> None:
    old = dataclasses.replace(MACHINES["a laptop"], device_nbytes=1 * GIB)
    for machine, name, fragment in (
        (dataclasses.replace(H200, host_nbytes=24 * GIB), "3.6 B, host", "budget.host: "),
        (old, "3.6 B, host", "budget.device: "),
        (MACHINES["one H100"], "8 B, auto on 80 GB", "not much more than 74.5 GiB"),
    ):
        said = case_of(TRAININGS[f"step:{name}"], machine)
        assert isinstance(said, str)
        assert fragment in said


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["one H100", "one H200"])
def test_the_planner_accepts_what_is_chosen(gpu: str, tmp_path: Path) -> None:
    """The very plan that the engine would make of it, from the model's own groups."""
    machine, chosen = MACHINES[gpu], 0
    for training in TRAININGS.values():
        case = case_of(training, machine)
        if isinstance(case, str):
            continue
        chosen += 1
        config = OffloadConfig.load({**case.config, "nvme": {"paths": [str(tmp_path)]}})
        device = machine.device_nbytes
        hardware = Hardware(device, machine.host_nbytes, machine.host_nbytes, machine.disk_nbytes)
        plan = make_plan(config, group_parameters(build_meta_model(config), ()).shape(), hardware)
        assert plan.uses_nvme == (training.label == "three tiers")
        if training.card_nbytes is not None:
            assert plan.budgets[Tier.DEVICE] < training.card_nbytes == plan.gpu_budget_nbytes
    assert chosen >= len(TRAININGS) - 4


@pytest.mark.slow
def test_passes_and_what_is_updated_on_the_device_count() -> None:
    one, eight = (planned(H200, name) for name in ("8 B, auto on 80 GB", "8 B, auto, 8 passes"))
    assert eight.tokens == 8 * one.tokens
    assert eight.flops == 8 * one.flops
    assert 0 < one.adam_nbytes < planned(H200, "8 B, host").adam_nbytes
    assert bounds(eight, H200)["bus"] == 0.0  # all of it is on the device
    assert "disk" in bounds(planned(H200, "13 B, three tiers"), H200)
