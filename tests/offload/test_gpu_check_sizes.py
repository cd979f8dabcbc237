"""What `make gpu-check` trains on which machine, and what bounds its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.bench.gpu_bounds import bounds, copy_speeds, judge
from offload.bench.gpu_machine import GpuMachine
from offload.bench.gpu_sizes import DEEPSPEED, GIB, OURS, SHAPES, Needs, choose
from offload.bench.gpu_step import OffloadedOnGpu, train
from offload.config import OffloadConfig
from offload.errors import IntegrityError
from offload.planning.plan import Hardware
from offload.planning.planner import make_plan
from offload.train.model import build_meta_model, parameter_count
from offload.zero.discovery import discover
from tests.offload.gpu_check_cases import H200, MACHINES, chosen


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_has_the_parameters_it_is_said_to_have(shape: Any) -> None:
    config = OffloadConfig.load({"train": {"model": shape.model()}})
    assert parameter_count(build_meta_model(config)) == shape.numel


def test_an_h200_trains_8_billion_parameters_all_on_the_host() -> None:
    case = chosen(H200)
    assert (case.shape.name, case.record_share_on_nvme, case.why) == ("8 B", 0.0, ())
    assert case.device_budget_nbytes == 24 * GIB
    assert case.config()["placement"]["optimizer"] == "host"


def test_what_ram_cannot_hold_spills_and_what_the_disk_cannot_is_made_smaller() -> None:
    spilled = chosen(MACHINES["less RAM"])
    assert spilled.shape.name == "8 B"
    assert 0 < spilled.record_share_on_nvme < 0.5
    assert "on nvme" in spilled.why[-1]
    without_disk = dataclasses.replace(MACHINES["less RAM"], disk_nbytes=1 * GIB)
    smaller = chosen(without_disk)
    assert smaller.shape.name == "3.6 B"
    assert "8 B: ours needs" in smaller.why[0]
    assert "1.0 GiB are free" in smaller.why[0]


def test_a_machine_that_gives_memory_slowly_gets_what_it_can_finish() -> None:
    slow = chosen(dataclasses.replace(H200, touch_bytes_per_s=0.3e9))
    assert slow.shape.numel < chosen(H200).shape.numel
    assert slow.estimated_s <= 240
    assert "8 B: would take about" in slow.why[0]


def test_what_a_peer_can_hold_bounds_what_both_train() -> None:
    both = chosen(H200, (OURS, DEEPSPEED))
    assert both.shape.name == "3.6 B"
    assert "8 B: DeepSpeed ZeRO-3 needs" in both.why[0]
    roomy = dataclasses.replace(H200, host_nbytes=1000 * GIB)
    assert chosen(roomy, (OURS, DEEPSPEED)).shape == chosen(roomy).shape


def test_batches_shrink_with_the_device() -> None:
    small = dataclasses.replace(H200, device_nbytes=60 * GIB)
    assert chosen(small).batch < chosen(H200).batch


def test_a_machine_with_nothing_gets_nothing_and_every_reason() -> None:
    nothing = dataclasses.replace(H200, host_nbytes=4 * GIB, disk_nbytes=0)
    case, refused = choose(nothing, 240.0)
    assert case is None
    assert len(refused) == len(SHAPES)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("needs", [(OURS,), (OURS, DEEPSPEED)], ids=["ours", "both"])
def test_the_planner_accepts_what_is_chosen(
    machine: GpuMachine, needs: tuple[Needs, ...], tmp_path: Path
) -> None:
    """The very plan that the engine would make of it, from the model's own groups."""
    case = chosen(machine, needs)
    config = OffloadConfig.load({**case.config(), "nvme": {"paths": [str(tmp_path)]}})
    hardware = Hardware(
        machine.device_nbytes, machine.host_nbytes, machine.host_nbytes, machine.disk_nbytes
    )
    plan = make_plan(config, discover(build_meta_model(config), ()).shape(), hardware)
    assert plan.uses_nvme == (case.record_share_on_nvme > 0)


# ---------------------------------------------------------------- bounds
def test_a_step_is_judged_by_the_least_bytes_and_the_operations() -> None:
    case = chosen(H200)
    speeds = {"host to device": 50e9, "device to host": 40e9}
    weights = 2 * case.shape.numel
    assert weights < case.device_budget_nbytes  # so each goes to the device once
    found = bounds(case, H200, speeds)
    assert found["link"] == pytest.approx(weights / 40e9)
    assert found["bus"] == pytest.approx(26 * case.shape.numel / 150e9)
    assert "disk" not in found
    moved = [{"host to device": 3 * weights, "device to host": weights}] * 3
    judged = judge(case, {"seconds": [9.0, 10.0, 30.0], "moved_nbytes": moved}, H200, speeds)
    assert judged["tokens_per_s"] == pytest.approx(case.tokens / 10)
    assert judged["roofline_s"] == max(found["link"], found["compute"])
    assert judged["share_of_roofline"] == pytest.approx(judged["roofline_s"] / 10)
    assert judged["host to device, moved per least"] == pytest.approx(3)


def test_weights_that_the_device_cannot_keep_come_twice() -> None:
    case = dataclasses.replace(chosen(H200), device_budget_nbytes=4 * GIB)
    weights = 2 * case.shape.numel
    assert case.least_to_device_nbytes == 2 * weights - 4 * GIB


def test_without_copies_there_is_no_roofline() -> None:
    judged = judge(chosen(H200), {"seconds": [2.0]}, H200, copy_speeds({}))
    assert "share_of_roofline" not in judged
    assert judged["bounds_s"].keys() == {"compute", "bus"}


def test_operations_are_those_of_the_matrices_plus_attention() -> None:
    shape = SHAPES[0]
    model = shape.flops(1, recomputed=False)
    matrices = 6 * (shape.numel - shape.vocab * shape.hidden)  # the embedding is looked up
    assert 1 < model / matrices < 1.05
    assert 1.25 < shape.flops(1, recomputed=True) / model < 4 / 3


# ---------------------------------------------------------------- steps, on the CPU
def tiny(**keys: Any) -> dict[str, Any]:
    model = {
        "shape": "llama", "layers": 2, "hidden": 64, "heads": 2, "mlp": 128, "vocab": 256,
        "tied": False,
    }  # fmt: skip
    return {
        "device": "cpu", "precision": "fp32", "budget": {"device": "64MiB", "host": "64MiB"},
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "host"),
        "train": {"model": model, "batch": 2, "sequence": 16}, **keys,
    }  # fmt: skip


def test_steps_are_what_lies_between_two_losses() -> None:
    told: list[dict[str, Any]] = []
    found = train(OffloadedOnGpu, tiny(), 4, torch.device("cpu"), told.append)
    assert told == [found]
    assert len(found["losses"]) == 4
    assert len(found["seconds"]) == len(found["moved_nbytes"]) == 3
    assert len(set(found["losses"])) == 4  # updates were made in between
    assert min(found["seconds"]) > 0
    assert found["tokens"] == 32
    again = train(OffloadedOnGpu, tiny(), 4, torch.device("cpu"), told.append)
    assert again["losses"] == found["losses"]


def test_losses_that_are_not_finite_are_no_measurement() -> None:
    wild = tiny(optimizer={"type": "sgd", "lr": 1e30, "momentum": 0.0})
    with pytest.raises(IntegrityError, match="losses are not finite"):
        train(OffloadedOnGpu, wild, 3, torch.device("cpu"), lambda _: None)
