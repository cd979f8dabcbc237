"""What `make gpu-check` trains on which machine, and what bounds its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.gpu_sizes import GIB, SHAPES, case_of, deepspeed_short
from benchmarks.gpu_step import bounds, row_of
from offload.bench.record import Kind
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.zero.groups.parameter_grouping import group_parameters
from tests.benchmarks.gpu_check_cases import H200, MACHINES, planned, solved_once

__all__ = ["solved_once"]


# ---------------------------------------------------------------- sizes
def test_what_a_machine_cannot_hold_is_left_out_with_the_planners_reason() -> None:
    small = dataclasses.replace(H200, disk_nbytes=1 * GIB)
    old = dataclasses.replace(MACHINES["a laptop"], device_nbytes=5 * GIB)
    for machine, shape, spilled, fragment in (
        (MACHINES["less RAM"], "8 B", 0, "budget.host: "),
        (small, "3.6 B", 50, "budget.nvme: "),
        (old, "3.6 B", 0, "budget.device: "),
    ):
        said = case_of(SHAPES[shape], machine, spilled)
        assert isinstance(said, str)
        assert fragment in said
    assert deepspeed_short(planned(H200, "3.6 B"), H200) == ""
    short = deepspeed_short(planned(H200, "8 B"), H200)
    assert short.startswith("DeepSpeed needs 44.")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spilled"), [("3.6 B", 0), ("3.6 B", 50), ("8 B", 0)])
def test_the_planner_accepts_what_is_chosen(shape: str, spilled: int, tmp_path: Path) -> None:
    """The very plan that the engine would make of it, from the model's own groups."""
    case = planned(H200, shape, spilled)
    config = OffloadConfig.load({**case.config, "nvme": {"paths": [str(tmp_path)]}})
    hardware = Hardware(H200.device_nbytes, H200.host_nbytes, H200.host_nbytes, H200.disk_nbytes)
    plan = make_plan(config, group_parameters(build_meta_model(config), ()).shape(), hardware)
    assert plan.uses_nvme == (case.record_nbytes_on_nvme > 0) == (spilled > 0)


# ---------------------------------------------------------------- bounds
STEP = {
    "seconds": [9.0, 10.0, 30.0], "peak_rss_nbytes": 1, "peak_device_nbytes": 1, "moved_nbytes": [],
}  # fmt: skip


def test_a_step_is_judged_by_the_least_bytes_and_the_operations() -> None:
    case = planned(H200, "8 B")
    weights = 2 * case.numel
    assert weights < case.device_budget_nbytes  # so each goes to the device once
    seconds = bounds(case, H200)
    assert seconds["link"] == pytest.approx(weights / 40e9)
    assert seconds["bus"] == pytest.approx(26 * case.numel / 150e9)
    assert "disk" not in seconds
    moved = [{"host to device": 3 * weights, "device to host": weights}] * 3
    facts = row_of("offload", Kind.OFFLOAD, case, {**STEP, "moved_nbytes": moved}, H200).facts
    assert facts["tokens_per_s"] == pytest.approx(case.tokens / 10)
    longest = max(seconds["link"], seconds["compute"])
    assert facts["share_of_roofline"] == pytest.approx(longest / 10)
    assert facts["share_of_all_bounds"] == pytest.approx(max(seconds.values()) / 10)
    assert facts["host to device, moved per least"] == pytest.approx(3)
