"""What `make gpu-check` trains on which machine, and what bounds its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import DEEPSPEED, GIB, Peer
from benchmarks.gpu_step import bounds, row_of
from offload.bench.record import Kind
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.zero.groups.discovery import discover
from tests.benchmarks.gpu_check_cases import H200, MACHINES, chosen, solved_once

__all__ = ["solved_once"]


# ---------------------------------------------------------------- sizes


@pytest.mark.slow
def test_what_ram_cannot_hold_spills_and_what_the_disk_cannot_is_made_smaller() -> None:
    spilled = chosen(MACHINES["less RAM"])
    assert spilled.shape.name == "8 B"
    assert 0 < spilled.record_nbytes_on_nvme < 5 * spilled.numel
    assert "on nvme" in spilled.why[-1]
    without_disk = dataclasses.replace(MACHINES["less RAM"], disk_nbytes=1 * GIB)
    smaller = chosen(without_disk)
    assert smaller.shape.name == "3.6 B"
    assert smaller.why[0].startswith("8 B: budget.nvme: ")
    assert "GiB short of" in smaller.why[0]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("peers", [(), (DEEPSPEED,)], ids=["ours", "both"])
def test_the_planner_accepts_what_is_chosen(
    machine: GpuMachine, peers: tuple[Peer, ...], tmp_path: Path
) -> None:
    """The very plan that the engine would make of it, from the model's own groups."""
    case = chosen(machine, peers)
    config = OffloadConfig.load({**case.config, "nvme": {"paths": [str(tmp_path)]}})
    hardware = Hardware(
        machine.device_nbytes, machine.host_nbytes, machine.host_nbytes, machine.disk_nbytes
    )
    plan = make_plan(config, discover(build_meta_model(config), ()).shape(), hardware)
    assert plan.uses_nvme == (case.record_nbytes_on_nvme > 0)


# ---------------------------------------------------------------- bounds
STEP = {
    "seconds": [9.0, 10.0, 30.0], "peak_rss_nbytes": 1, "peak_device_nbytes": 1, "moved_nbytes": [],
}  # fmt: skip


def test_a_step_is_judged_by_the_least_bytes_and_the_operations() -> None:
    case = chosen(H200)
    weights = 2 * case.numel
    assert weights < case.device_budget_nbytes  # so each goes to the device once
    found = bounds(case, H200)
    assert found["link"] == pytest.approx(weights / 40e9)
    assert found["bus"] == pytest.approx(26 * case.numel / 150e9)
    assert "disk" not in found
    moved = [{"host to device": 3 * weights, "device to host": weights}] * 3
    facts = row_of("ours", Kind.OURS, case, {**STEP, "moved_nbytes": moved}, H200).facts
    assert facts["tokens_per_s"] == pytest.approx(case.tokens / 10)
    longest = max(found["link"], found["compute"])
    assert facts["share_of_roofline"] == pytest.approx(longest / 10)
    assert facts["share_of_all_bounds"] == pytest.approx(max(found.values()) / 10)
    assert facts["host to device, moved per least"] == pytest.approx(3)


# ---------------------------------------------------------------- steps, on the CPU
