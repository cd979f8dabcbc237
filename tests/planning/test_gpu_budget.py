"""budget.gpu: a GPU's memory in all. The plan is within it, or refused with the parts named."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.errors import BudgetError, ConfigError
from offload.gpt import build_meta_model
from offload.memory.preflight import gpu_line
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import RunPlan, check_plan, chosen_config, make_plan, plan_run
from offload.planning.choice.solver import RunFacts
from offload.planning.machine.baseline import GPU_NBYTES, known_baseline
from offload.planning.machine.speeds import NOMINAL
from offload.planning.plan.estimate import PlaceEstimate, Workload
from offload.planning.plan.plan import Hardware, Plan
from offload.tiers.tier import Medium, Tier, register
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters

MIB, GIB = 1 << 20, 1 << 30
H100 = Hardware(79 * GIB, 250 * GIB, 250 * GIB, 1024 * GIB)
LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 128256}
WORK = Workload(16, 1024)


def config(gpu: str | int = "24GiB", checkpoint: Any = True, **keys: Any) -> OffloadConfig:
    return OffloadConfig.load({
        "precision": "bf16", "train": {"model": LLAMA_8B}, "clip_grad_norm": 1.0,
        "placement": {"activations": {"checkpoint": checkpoint}}, **keys,
        "budget": {"gpu": gpu, **keys.get("budget", {})},
    })  # fmt: skip


@cache
def shape() -> ModelShape:
    return group_parameters(build_meta_model(config()), ()).shape()


@cache
def traced(checkpoint: Any) -> ActivationFacts:
    asked = config(checkpoint=checkpoint)
    return trace_activations(build_meta_model(asked), asked, WORK, device="cuda")


def planned(asked: OffloadConfig, hardware: Hardware = H100) -> RunPlan:
    run = RunFacts(
        WORK, replace(NOMINAL, gpu=True), lambda c: traced(c.placement.activations.checkpoint),
        known_baseline("bf16", gpu=True),
    )  # fmt: skip
    return plan_run(asked, shape(), hardware, run)


def unplanned(asked: OffloadConfig, hardware: Hardware = H100) -> Plan:
    """The plan of `initialize`, which does not know the pass."""
    return make_plan(asked, shape(), hardware)


def gpu_of(run: RunPlan) -> PlaceEstimate:
    return run.memory.places[Tier.DEVICE]


def test_8_b_at_16_x_1024_tokens_train_within_24_gib() -> None:
    run = planned(config())
    check_plan(run.best)
    gpu, tier = gpu_of(run), run.best.plan.budgets[Tier.DEVICE]
    assert gpu.capacity_nbytes == 24 * GIB
    assert gpu.peak_nbytes == tier + traced(True).peak_nbytes + GPU_NBYTES < 0.98 * 24 * GIB
    assert traced(True).peak_nbytes < 9.1e9
    assert re.fullmatch(
        r"GPU 2[23]\.\d of 24\.0 GiB: (parameters \d+\.\d, )?pass 8\.\d, copies and buffers "
        r"\d+\.\d, context and workspaces 0\.7", gpu_line(gpu),
    )  # fmt: skip


@pytest.mark.parametrize("gpu", ["12GiB", "16GiB", "40GiB", "60%", "500GiB"])
def test_the_tier_gets_what_pass_and_context_leave(gpu: str) -> None:
    run = planned(config(gpu))
    check_plan(run.best)
    total = {"60%": int(0.6 * 79 * GIB), "500GiB": 79 * GIB}.get(gpu) or int(gpu[:2]) * GIB
    assert gpu_of(run).capacity_nbytes == total
    assert 0.9 * total < gpu_of(run).peak_nbytes <= 0.98 * total


def test_a_pass_beyond_it_is_recomputed_or_refused_with_the_parts_and_a_remedy() -> None:
    assert planned(config(checkpoint="auto")).best.config.placement.activations.checkpoint
    run = planned(config(checkpoint=False))
    assert not run.fits
    with pytest.raises(BudgetError) as error:
        check_plan(run.best)
    said = str(error.value)
    assert said.startswith("budget.gpu: 24.0 GiB is ")
    for part in ("parameters of the unit that runs", "+ pass ", "+ context and workspaces 676.0"):
        assert part in said
    assert "a smaller batch, shorter sequences, in training also placement.activations" in said


def test_activations_without_room_elsewhere_are_refused_too() -> None:
    keys: dict[str, Any] = {
        "placement": {
            **dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
            "activations": {"tier": "host", "checkpoint": False},
        },
        "budget": {"host": "8GiB"},
    }
    with pytest.raises(BudgetError, match=r"budget.gpu: .* \+ activations that stay "):
        check_plan(planned(config("40GiB", **keys)).best)


def test_both_budgets_hold() -> None:
    smaller = planned(config(budget={"device": "4GiB"}))
    assert smaller.best.plan.budgets[Tier.DEVICE] == 4 * GIB
    larger = planned(config(budget={"device": "40GiB"}))
    check_plan(larger.best)
    assert gpu_of(larger).peak_nbytes <= 24 * GIB
    assert unplanned(config(budget={"device": "40GiB"})).budgets[Tier.DEVICE] < 19 * GIB


def test_without_a_known_pass_a_fifth_is_left_and_what_a_plan_chose_stays() -> None:
    assert unplanned(config("12GiB")).budgets[Tier.DEVICE] <= 0.8 * 12 * GIB - GPU_NBYTES
    run = planned(config())
    chosen = chosen_config(run.best.config, run.best.plan)
    assert chosen.budget.gpu == 24 * GIB
    assert unplanned(chosen).budgets == run.best.plan.budgets
    said = (
        r"1.0 GiB is .* short .* \+ a fifth for the pass 204.8 MiB.* or set a lower budget.device:"
    )
    with pytest.raises(BudgetError, match=said):
        unplanned(config("1GiB"))


def test_a_full_gpu_and_tensors_that_are_there_leave_less() -> None:
    held = unplanned(config("12GiB"), replace(H100, device_held_nbytes=4 * GIB))
    full = unplanned(config("12GiB"), replace(H100, device_nbytes=8 * GIB))
    assert held.budgets == full.budgets == unplanned(config("8GiB")).budgets
    assert held.gpu_budget_nbytes == 12 * GIB
    with pytest.raises(BudgetError, match="that are free of it is"):
        unplanned(config("12GiB"), replace(H100, device_held_nbytes=12 * GIB))


def test_it_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"budget.gpu: .* remove budget.gpu"):
        unplanned(config(), replace(H100, device_nbytes=0))
    with pytest.raises(ValueError, match="'gpu' cannot be a tier's name"):
        register(Tier(name="gpu", title="", medium=Medium.HOST, capacity_nbytes=1))
