"""An open budget of a GPU is no more than the plan can use of it, and never less than it does."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.activations.facts import NOTHING
from offload.planning.choice.planner import make_plan
from offload.planning.choice.solver import NO_LIBRARIES, Candidate, solve
from offload.planning.machine.baseline import Baseline
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Hardware, Plan, needed_nbytes
from offload.planning.step.memory import PlannedMemory
from offload.planning.step.program import total_of
from offload.planning.step.step_time import step_traffic
from offload.tiers.tier import Tier
from offload.zero.ranks.sharding import ALONE, Sharding
from tests.planning.test_solver import CLASSES, known, model

MIB, GIB = 1 << 20, 1 << 30
GPU = Hardware(80 * GIB, 64 * GIB, 64 * GIB, 64 * GIB)
PLACEMENTS = [
    dict(zip(CLASSES, tiers, strict=True))
    for tiers in itertools.product(
        ("host", "nvme", "device", {"device": "30%", "host": "70%"}), ("host", "device"),
        ("host", "nvme", "device", {"device": "40%", "nvme": "60%"}),
    )
]  # fmt: skip
# `chunk`: that of a model of a few MiB
KEYS: dict[str, Any] = {"precision": "bf16", "optimizer": {"chunk": 1 << 18}}


def small() -> Any:
    """8 blocks of 3 matrices: 6.3 M parameters, 12 MiB in bf16."""
    return model(8, 512)


def laid_out(hardware: Hardware = GPU, **keys: Any) -> Candidate:
    return solve(OffloadConfig.load({**KEYS, **keys}), small(), hardware).best


def peak_of(candidate: Candidate) -> int:
    planned = PlannedMemory(
        candidate.plan, candidate.config, small(), NOTHING, Workload(2, 64), NO_LIBRARIES
    )
    return planned.estimate().ledger_peaks[Tier.DEVICE]


def traffic_of(candidate: Candidate) -> Any:
    work = Workload(2, 64)
    return total_of(step_traffic(candidate.plan, candidate.config, small(), None, work).moves)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_small_model_takes_little_of_a_large_gpu_and_loses_nothing(placement):
    opened = laid_out(placement=placement)
    budget = opened.plan.budgets[Tier.DEVICE]
    given = laid_out(placement=placement, budget={"device": "60GiB"})
    assert needed_nbytes(opened.plan, Tier.DEVICE) <= budget
    assert budget < 200 * MIB
    assert traffic_of(opened) == traffic_of(given)
    assert peak_of(opened) == peak_of(given) <= budget


def test_a_gpu_that_is_smaller_than_that_gives_what_it_has():
    tight = replace(GPU, device_nbytes=16 * MIB)
    plan = laid_out(tight, placement=dict.fromkeys(CLASSES, "host")).plan
    assert plan.budgets[Tier.DEVICE] == int(0.8 * 16 * MIB)


@pytest.mark.parametrize("budget", ["60GiB", "50%"])
def test_a_budget_that_is_given_stays(budget):
    plan = laid_out(budget={"device": budget}, placement=dict.fromkeys(CLASSES, "host")).plan
    assert plan.budgets[Tier.DEVICE] == {"60GiB": 60 * GIB, "50%": 40 * GIB}[budget]


def test_the_search_has_all_of_the_gpu_and_activations_have_what_the_plan_leaves():
    best = solve(OffloadConfig.load(KEYS), small(), GPU, known()).best
    assert best.plan.room_nbytes(Tier.DEVICE) > 70 * GIB
    assert [best.plan.placements[c].describe() for c in best.plan.placements] == ["device"] * 3
    assert best.plan.budgets[Tier.DEVICE] < 200 * MIB
    place = PlannedMemory(
        best.plan, best.config, small(), NOTHING, Workload(2, 64), Baseline(0)
    ).estimate().places[Tier.DEVICE]  # fmt: skip
    assert place.peak_nbytes == best.plan.budgets[Tier.DEVICE]


def test_ranks_have_their_buffers_within_it():
    def plan(sharding: Sharding, **keys: Any) -> Plan:
        config = OffloadConfig.load({**KEYS, "placement": dict.fromkeys(CLASSES, "host"), **keys})
        return make_plan(config, small(), replace(GPU, sharding=sharding))

    alone, shared = (plan(each) for each in (ALONE, Sharding.of(3, None, 4, 0)))
    assert shared.shared is not None
    buffers = shared.shared.total_nbytes
    assert buffers < shared.budgets[Tier.DEVICE] < alone.budgets[Tier.DEVICE] + buffers
