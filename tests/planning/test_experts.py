"""Experts in a plan: what a step touches, memory that one of them needs, and representatives."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.config import OffloadConfig
from offload.planning.choice.planner import make_plan
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Hardware, Plan, needed_nbytes
from offload.planning.plan.sizes import pages
from offload.planning.step.program import total_of
from offload.planning.step.representatives import touched
from offload.planning.step.step_time import step_traffic
from offload.tiers.tier import Tier
from offload.tools.memest.estimate.result import active_numel
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters
from offload.zero.ranks.sharding import Sharding
from tests.planning.test_step_time import OneAfterTheOther

transformers = pytest.importorskip("transformers")

HARDWARE = Hardware(0, 1 << 36, 1 << 36, 1 << 38)
KEYS: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "num_experts": 64,
    "num_experts_per_tok": 4, "intermediate_size": 64,
}  # fmt: skip


def model(chosen: int | None = 4, *, experts: bool = True, **keys: Any) -> ModelShape:
    config = transformers.Qwen3MoeConfig(**{**KEYS, **keys})
    with torch.device("meta"):
        built = transformers.Qwen3MoeForCausalLM(config)
    return replace(group_parameters(built, experts=experts).shape(), experts_per_token=chosen)


def plan_of(shape: ModelShape, **keys: Any) -> tuple[Plan, OffloadConfig]:
    budget = {"host": "256MiB", "nvme": "8GiB"}
    chunk = {"chunk": 65536}
    config = OffloadConfig.load({"budget": budget, "optimizer": chunk, **keys})
    return make_plan(config, shape, HARDWARE), config


NVME = {"placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}}


# ---------------------------------------------------------------- how many are touched
@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(128, 1, 64), (64, 4, 10), (8, 2, 3)])
def test_the_expected_number_is_that_of_drawn_routings(
    experts: int, chosen: int, tokens: int
) -> None:
    rng = np.random.default_rng(0)
    drawn = [
        len(np.unique(np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen]))
        for _ in range(400)
    ]
    assert np.mean(drawn) == pytest.approx(touched(experts, chosen, tokens), rel=0.02)


def test_a_token_is_computed_with_the_experts_chosen_for_it() -> None:
    shape = model()
    expert = 3 * 64 * 64
    assert shape.numel - active_numel(shape) == 4 * (64 - 4) * expert
    assert active_numel(model(None)) == active_numel(model(64)) == shape.numel


# ---------------------------------------------------------------- memory
def test_the_least_memory_is_one_expert_s_beside_its_block_not_a_table_s() -> None:
    whole, _ = plan_of(model(experts=False), **NVME)
    apart, _ = plan_of(shape := model(), **NVME)
    assert needed_nbytes(apart, Tier.HOST) < needed_nbytes(whole, Tier.HOST) / 4
    block = next(g for g in apart.groups if g.name == "model.layers.0")
    expert = next(g for g, s in zip(apart.groups, shape.groups, strict=True) if s.table)
    assert apart.unit_nbytes >= block.parameters + expert.parameters


# ---------------------------------------------------------------- over ranks
class _Listed(nn.ModuleList):
    def __init__(self, count: int, ep_size: int) -> None:
        super().__init__(nn.Linear(64, 64, bias=False) for _ in range(count))
        self.ep_size = ep_size


def _net(ep_size: int) -> nn.Module:
    """As one of `ep_size` ranks has it."""
    layers = []
    for _ in range(2):
        layer = nn.Module()
        layer.top_k, layer.gate = 2, nn.Linear(64, 32, bias=False)  # type: ignore[assignment]
        layer.experts = _Listed(32 // ep_size, ep_size)
        layers.append(layer)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_has_its_experts_and_a_part_of_their_states(stage: int) -> None:
    shape = group_parameters(_net(2), experts=False).shape()
    sharding = Sharding.of(stage, None, 4, 0)
    config = OffloadConfig.load(
        {"budget": {"host": "1GiB"}, "zero": {"stage": stage}, "optimizer": {"chunk": 65536}}
    )
    plan = make_plan(config, shape, replace(HARDWARE, sharding=sharding))
    experts = [group for group in plan.groups if group.table]
    assert len(experts) == 2 * 32 // 2
    numel, part = 64 * 64, 2 if stage else 1  # each expert is on two ranks
    for group in experts:
        assert group.parameters == pages(numel * 4)
        assert group.gradients == pages(numel * 4 // part) + pages(numel * 4)
        assert 0 <= sum(group.records) - 8 * numel // part <= 4096  # two moments, and a page
    assert active_numel(shape) == active_numel(group_parameters(_net(1)).shape())


# ---------------------------------------------------------------- beside the runtime
class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(64, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = x
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return out


def test_a_step_with_experts_moves_the_predicted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training three blocks of experts, of which all get tokens."""
    keys = {"budget": {"host": "6MiB", "nvme": "1GiB"}, "optimizer": {"chunk": 65536}}
    config = OffloadConfig.load({**keys, **NVME})
    in_turn = OneAfterTheOther(monkeypatch)
    torch.manual_seed(0)
    net = nn.Sequential(*(_Block() for _ in range(3)))
    shape = group_parameters(net).shape()
    assert (len(shape.tables), shape.experts_per_token) == (3, 2)
    moved = []
    with offload.initialize(net, config) as engine:
        for _ in range(4):
            engine.module(torch.randn(256, 64)).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            moved.append(engine.report().bytes_moved)
        in_turn.end(engine)
        work = Workload(1, 256)
        said = total_of(step_traffic(engine.plan, engine.config, shape, None, work).moves)
    read, written = (moved[-1][link] - moved[-2][link] for link in ("nvme read", "nvme write"))
    assert said.written == pytest.approx(written, rel=0.03)
    assert said.read == pytest.approx(read, rel=0.06)
