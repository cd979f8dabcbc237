"""Homes of experts beside those of the rest: bytes, the search, and predicted steps."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.choice.plan_text import reasons
from offload.planning.choice.planner import make_plan
from offload.planning.choice.solver import RunFacts, Solution, solve
from offload.planning.plan.experts import idle_nbytes
from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import CLASSES, PLACED, ExpertClass, class_of
from offload.planning.plan.workload import Workload
from offload.tiers.errors import ConfigError
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.tools.memest.cli import main
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding
from tests.planning.test_experts import (
    HARDWARE,
    model,
    plan_of,
)
from tests.planning.test_step_time import FACTS, SPEEDS

BUDGET = {"host": "8MiB", "nvme": "8GiB"}
TIGHT = {"budget": BUDGET, "optimizer": {"chunk": 65536}}
FEW = Workload(1, 2)


def solved(shape: ModelShape, work: Workload, placement: Any, **keys: Any) -> Solution:
    config = OffloadConfig.load({**TIGHT, "placement": placement, **keys})
    return solve(config, shape, HARDWARE, RunFacts(work, SPEEDS, lambda config: FACTS))


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 128])
def test_blocks_are_in_order_and_as_near_to_the_shares_as_can_be(count: int) -> None:
    shares = Placement(((Tier.DEVICE, 0.25), (Tier.HOST, 0.35), (Tier.NVME, 0.4)))
    tiers = shares.blocks(count)
    assert len(tiers) == count
    assert tiers == sorted(tiers, key=list(Tier).index)
    for tier, share in shares.shares:
        assert abs(tiers.count(tier) - share * count) <= 1
    assert Placement.on(Tier.NVME).blocks(count) == [Tier.NVME] * count


def test_homes_add_up_to_what_a_plan_holds() -> None:
    placement = {
        "parameters": {"host": "40%", "nvme": "60%"}, "gradients": "host", "optimizer": "nvme",
        "experts": {"parameters": "nvme", "gradients": "nvme",
                    "optimizer": {"host": "25%", "nvme": "75%"}},
    }  # fmt: skip
    plan, _ = plan_of(shape := model(), placement=placement)
    assert tuple(plan.placements) == PLACED
    for state_class, tier in itertools.product(CLASSES, Tier):
        parts = [plan.homes[p].get(tier, 0) for p in PLACED if class_of(p) is state_class]
        assert sum(parts) == plan.expected[tier].get(state_class, 0)
    table = next(iter(shape.tables.values()))
    assert [plan.records[index][0] for index in table] == [Tier.HOST] * 16 + [Tier.NVME] * 48
    idle = idle_nbytes(plan, shape, FEW)
    assert 0 < idle[Tier.HOST][CLASSES[2]] < plan.homes[ExpertClass.OPTIMIZER][Tier.HOST]
    everything = idle_nbytes(plan, replace(shape, experts_per_token=None), FEW)
    assert not any(n for held in everything.values() for n in held.values())


def test_at_stage_3_of_several_ranks_experts_have_no_homes() -> None:
    config = OffloadConfig.load({**TIGHT, "placement": {"experts": "nvme"}})
    hardware = replace(HARDWARE, sharding=Sharding.of(3, None, 2, 0))
    with pytest.raises(ConfigError, match=r"zero.stage: 3 on 2 ranks .* set zero.stage: 2"):
        make_plan(config, model(experts=False), hardware)


# ---------------------------------------------------------------- the search
def _fastest_share(plan: Plan, placed: Any) -> float:
    return dict(plan.placements[placed].shares).get(Tier.HOST, 0.0)


def test_where_few_experts_are_touched_memory_is_what_every_token_uses() -> None:
    shape = model(1, num_hidden_layers=2, num_local_experts=32)
    auto = solved(shape, FEW, {"experts": "auto"})
    together = solved(shape, FEW, "auto")
    assert auto.best.fits
    assert auto.best.seconds < together.best.seconds
    for state_class, experts in zip(CLASSES, ExpertClass, strict=True):
        assert _fastest_share(auto.best.plan, state_class) >= _fastest_share(
            auto.best.plan, experts
        )
    assert {f"placement.{each}" for each in PLACED} <= set(auto.open_keys)
    assert set(reasons(auto)) == set(PLACED)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [False, True])
def test_homes_of_their_own_are_not_slower_where_few_are_touched(gpu: bool) -> None:
    shape = model(num_hidden_layers=2, num_local_experts=32)
    hardware = replace(HARDWARE, device_nbytes=(1 << 30) * gpu)
    seconds = []
    for placement in "auto", {"experts": "auto"}:
        budget = {**BUDGET, **({"device": "4MiB"} if gpu else {})}
        config = OffloadConfig.load({**TIGHT, "placement": placement, "budget": budget})
        speeds = replace(SPEEDS, gpu=gpu)
        run = RunFacts(FEW, speeds, lambda config: FACTS)
        best = solve(config, shape, hardware, run).best
        assert best.fits
        seconds.append(best.seconds)
    assert seconds[1] <= seconds[0] * 1.03


# ---------------------------------------------------------------- memest
def test_memest_says_and_writes_where_experts_are(tmp_path: Path, capsys: Any) -> None:
    keys = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
        "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
        "num_experts": 16, "num_experts_per_tok": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(keys))
    options = [
        str(tmp_path), "--no-measure", "--batch", "1", "--sequence", "8", "--gpu", "none",
        "-o", "budget={host: 64MiB, nvme: 1GiB}", "-o", "micro_batches=1",
        "-o", "placement={experts: {optimizer: {host: 25%, nvme: 75%}}}",
        "-o", "placement.activations.checkpoint=false",
    ]  # fmt: skip
    path = tmp_path / "a.yaml"
    with pytest.raises(SystemExit):
        main([*options, "--format", "json", "--write", str(path)])
    placements = json.loads(capsys.readouterr().out)["plan"]["placements"]
    assert placements["experts.optimizer"] == {"host": 0.25, "nvme": 0.75}
    assert len(placements) == 6
    written = OffloadConfig.load(path).placement.homes()
    shares = {n: {str(t): s for t, s in home.shares} for n, home in written.items() if home}
    assert shares == placements
