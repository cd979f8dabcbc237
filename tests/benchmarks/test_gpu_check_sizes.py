"""What `make gpu-check` trains on which machine, and what bounds its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import DEEPSPEED, GIB, LARGE, SHAPES, Peer, choose
from benchmarks.gpu_step import bounds, row_of, train
from offload.bench.record import Kind
from offload.config import OffloadConfig
from offload.errors import IntegrityError
from offload.gpt import build_meta_model, parameter_count
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.zero.groups.discovery import discover
from tests.benchmarks.gpu_check_cases import H200, MACHINES, chosen, solved_once

__all__ = ["solved_once"]


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("shape", "billions"),
    list(zip((LARGE, *SHAPES), (29.7, 8.03, 3.61, 1.50, 0.36, 0.15, 0.0084), strict=True)),
)
def test_a_shape_has_the_parameters_it_is_said_to_have(shape: Any, billions: float) -> None:
    config = OffloadConfig.load({"train": {"model": shape.model()}})
    assert parameter_count(build_meta_model(config)) / 1e9 == pytest.approx(billions, rel=0.1)


def test_an_h200_trains_8_billion_parameters_all_on_the_host() -> None:
    case = chosen(H200)
    assert (case.shape.name, case.record_nbytes_on_nvme, case.why) == ("8 B", 0, ())
    assert case.device_budget_nbytes == 24 * GIB
    assert case.config["placement"]["optimizer"] == "host"


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
def test_a_machine_that_gives_memory_slowly_gets_what_it_can_finish() -> None:
    slow = chosen(dataclasses.replace(H200, touch_bytes_per_s=0.3e9))
    assert slow.numel < chosen(H200).numel
    assert slow.estimated_s <= 240
    assert "8 B: would take about" in slow.why[0]


def test_what_a_peer_can_hold_bounds_what_both_train() -> None:
    both = chosen(H200, (DEEPSPEED,))
    assert both.shape.name == "3.6 B"
    assert "8 B: DeepSpeed ZeRO-3 needs" in both.why[0]
    roomy = dataclasses.replace(H200, host_nbytes=1000 * GIB)
    assert chosen(roomy, (DEEPSPEED,)).shape == chosen(roomy).shape


def test_a_machine_with_nothing_gets_nothing_and_every_reason() -> None:
    nothing = dataclasses.replace(H200, host_nbytes=3 * GIB, disk_nbytes=0)
    case, refused = choose(nothing, 240.0)
    assert case is None
    assert len(refused) == len(SHAPES)


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


def test_records_that_spilled_are_read_and_written() -> None:
    case = dataclasses.replace(chosen(H200), record_nbytes_on_nvme=10**9)
    assert bounds(case, H200)["disk"] == pytest.approx(0.5 + 0.5)


def test_weights_that_the_device_cannot_keep_come_twice() -> None:
    case = dataclasses.replace(chosen(H200), device_budget_nbytes=4 * GIB)
    weights = 2 * case.numel
    assert case.least_to_device_nbytes == 2 * weights - 4 * GIB


def test_operations_are_those_of_the_matrices_plus_attention() -> None:
    case = chosen(H200)
    # the embedding is looked up
    matrices = 6 * (case.numel - case.shape.vocab * case.shape.hidden) * case.tokens
    assert 1 < case.model_flops / matrices < 1.05
    assert 1.2 < case.flops / case.model_flops < 4 / 3


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


class Answers(list[dict[str, Any]]):
    """What a parent is told."""

    answer = list.append


def trained(folder: Path, **keys: Any) -> list[dict[str, Any]]:
    told = Answers()
    options = {
        "program": "benchmarks.gpu_step:QuickOurs", "settings": {}, "config": tiny(**keys),
        "steps": 4, "folder": str(folder),
    }  # fmt: skip
    train(options, told)  # type: ignore[arg-type]
    return told


def test_steps_are_what_lies_between_two_losses(tmp_path: Path) -> None:
    (found,) = trained(tmp_path)
    assert len(found["losses"]) == 4
    assert len(found["seconds"]) == len(found["moved_nbytes"]) == 3
    assert len(set(found["losses"])) == 4  # updates were made in between
    assert min(found["seconds"]) > 0
    (again,) = trained(tmp_path)
    assert again["losses"] == found["losses"]


def test_losses_that_are_not_finite_are_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="losses are not finite"):
        trained(tmp_path, optimizer={"type": "sgd", "lr": 1e30, "momentum": 0.0})
