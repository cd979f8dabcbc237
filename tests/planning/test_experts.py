"""Experts in a plan: what a step touches, memory that one of them needs, and representatives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.config import OffloadConfig
from offload.planning.choice.planner import make_plan
from offload.planning.choice.solver import RunFacts, _choices
from offload.planning.plan.experts import active_numel, estimate_experts, touched, touched_whole
from offload.planning.plan.plan import Hardware, Plan, needed_nbytes
from offload.planning.plan.sizes import CLASSES, pages
from offload.planning.plan.workload import Workload
from offload.planning.step.exchanges import step_collectives
from offload.planning.step.program import write_program
from offload.planning.step.representatives import MOST_GROUPS, representatives
from offload.planning.step.step_time import estimate_step
from offload.planning.step.traffic import find_copies, step_traffic
from offload.tiers.tier import Tier
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding
from tests.planning.test_step_time import FACTS, SPEEDS, let_all_be_done_at_once

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
    return replace(discover(built, experts=experts).shape(), experts_per_token=chosen)


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


def test_a_router_that_prefers_some_touches_fewer() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(64, 0.3))
    drawn = [len(np.unique(rng.choice(64, size=50, p=shares))) for _ in range(200)]
    assert np.mean(drawn) < touched(64, 1, 50)


@pytest.mark.parametrize(
    ("experts", "chosen", "tokens", "number"),
    [(8, 8, 1, 8), (8, 9, 1, 8), (8, None, 0, 8), (8, 2, 0, 0), (8, 2, 1, 2), (8, 1, 1 << 40, 8),
     (1, 1, 1, 1), (1000, 1, 1, 1)],
)  # fmt: skip
def test_odd_numbers(experts: int, chosen: int | None, tokens: int, number: int) -> None:
    assert touched_whole(experts, chosen, tokens) == number


def test_a_token_is_computed_with_the_experts_chosen_for_it() -> None:
    shape = model()
    expert = 3 * 64 * 64
    assert shape.numel - active_numel(shape) == 4 * (64 - 4) * expert
    assert active_numel(model(None)) == active_numel(model(64)) == shape.numel


def test_a_step_touches_the_experts_of_all_its_passes() -> None:
    shape = model(1, num_experts=128)
    plan, _ = plan_of(shape, **NVME)
    found = estimate_experts(plan, shape, Workload(1, 64))
    assert found is not None
    assert found.touched_pass == pytest.approx(1 - (127 / 128) ** 64)
    more = estimate_experts(plan, shape, Workload(1, 64, passes=4))
    assert more is not None
    assert more.touched_step == pytest.approx(1 - (127 / 128) ** 256)
    assert more.touched_pass == found.touched_pass


def test_a_dense_model_has_no_experts() -> None:
    shape = model(experts=False)
    plan, _ = plan_of(shape)
    assert estimate_experts(plan, shape, Workload(1, 64)) is None


# ---------------------------------------------------------------- memory
def test_homes_are_the_sums_of_all_experts() -> None:
    split = {"parameters": "{host: 30%, nvme: 70%}", "gradients": "nvme", "optimizer": "nvme"}
    shape = model()
    config = OffloadConfig.load(
        {"budget": {"host": "256MiB", "nvme": "8GiB"}, "optimizer": {"chunk": 65536}},
        [f"placement={{{', '.join(f'{k}: {v}' for k, v in split.items())}}}"],
    )
    plan = make_plan(config, shape, HARDWARE)
    for name, homes in (("parameters", plan.parameters), ("gradients", plan.gradients)):
        held: Counter[Tier] = Counter()
        for group, tier in zip(shape.groups, homes, strict=True):
            held[tier] += pages(group.layout.numel * 4)
        state_class = next(each for each in CLASSES if str(each) == name)
        assert dict(held) == {t: plan.expected[t][state_class] for t in held}
    assert sum(plan.parameters.count(tier) for tier in Tier) == len(shape.groups)


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
    shape, sharding = discover(_net(2), experts=False).shape(), Sharding.of(stage, None, 4, 0)
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
    assert active_numel(shape) == active_numel(discover(_net(1)).shape())
    gathers, _ = step_collectives(config, shape, sharding, 1)
    dense = {index for index, group in enumerate(shape.groups) if not group.table}
    assert {each.group for each in gathers} == (dense if stage == 3 else set())


# ---------------------------------------------------------------- representatives
@pytest.mark.parametrize("work", [None, Workload(1, 8), Workload(1, 8, passes=3), Workload(9, 99)])
def test_representatives_add_up_and_each_is_of_one_home(work: Workload | None) -> None:
    placement = "placement={parameters: {host: 40%, nvme: 60%}, optimizer: {host: 50%, nvme: 50%}}"
    shape = model()
    config = OffloadConfig.load(
        {"budget": {"host": "256MiB", "nvme": "8GiB"}, "optimizer": {"chunk": 4096}}, [placement]
    )
    plan = make_plan(config, shape, HARDWARE)
    found = representatives(plan, shape, work, most_groups=64)
    pass_tokens = work.batch * work.sequence if work else 0
    for table in shape.tables.values():
        inside = [index for index in table if index in found.alike]
        assert sum(found.alike[index] for index in inside) == len(table)
        chosen = 4 if work else None
        assert sum(found.used[i] for i in inside) == touched_whole(64, chosen, pass_tokens)
        tokens = work.tokens if work else 0
        assert sum(found.updated[i] for i in inside) == touched_whole(64, chosen, tokens)
        assert all(found.used[i] <= found.updated[i] <= found.alike[i] for i in inside)
        homes: Counter[object] = Counter()
        stood: Counter[object] = Counter()
        for index in table:
            homes[plan.parameters[index], plan.gradients[index], plan.records[index]] += 1
        for index in inside:
            home = plan.parameters[index], plan.gradients[index], plan.records[index]
            stood[home] += found.alike[index]
        assert homes == stood


def test_a_small_model_is_simulated_group_by_group() -> None:
    plan, _ = plan_of(shape := model())
    found = representatives(plan, shape, None)
    assert found.model.units == shape.units
    assert set(found.alike.values()) == {1}


def test_a_program_of_thousands_of_experts_is_short() -> None:
    shape = model(num_hidden_layers=32, num_experts=128)
    plan, config = plan_of(shape)
    assert len(shape.groups) > 4000
    found = representatives(plan, shape, Workload(1, 64))
    program = write_program(config, found.model, 1)
    assert len(program.actions) <= 4 * 2 * MOST_GROUPS


@pytest.mark.sample("4GiB")
@pytest.mark.parametrize("host", ["64MiB", "4GiB"])
def test_bundles_move_the_bytes_that_single_experts_move(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for copies, and with room for all of them."""
    shape = model()
    config = OffloadConfig.load(
        {"budget": {"host": host, "nvme": "8GiB"}, "optimizer": {"chunk": 65536}, **NVME}
    )
    plan = make_plan(config, shape, HARDWARE)
    if host == "64MiB":
        plan = replace(plan, budgets={**plan.budgets, Tier.HOST: plan.total(Tier.HOST) + (2 << 20)})
    work = Workload(2, 512)
    single = step_traffic(plan, config, shape, None, work).total
    one = estimate_step(plan, config, shape, FACTS, work, SPEEDS)
    monkeypatch.setattr(representatives, "__defaults__", (64,))
    many = step_traffic(plan, config, shape, None, work)
    assert max(many.experts.alike.values()) > 1
    # a bundle is fetched ahead as a whole: where room is short its copies go before their use
    near = 0.2 if host == "64MiB" else 0.05
    assert many.total.read == pytest.approx(single.read, rel=near)
    assert many.total.written == pytest.approx(single.written, rel=0.02)
    together = estimate_step(plan, config, shape, FACTS, work, SPEEDS)
    assert together.seconds == pytest.approx(one.seconds, rel=near)


def test_what_is_not_touched_does_not_move() -> None:
    shape = model()
    plan, config = plan_of(shape, **NVME)
    plan = replace(plan, budgets={**plan.budgets, Tier.HOST: plan.total(Tier.HOST) + (2 << 20)})
    few, many = Workload(1, 4), Workload(2, 512)
    least = step_traffic(plan, config, shape, None, few).total
    most = step_traffic(plan, config, shape, None, many).total
    idle = 4 * (64 - touched_whole(64, 4, 4))
    expert = next(g for g, s in zip(plan.groups, shape.groups, strict=True) if s.table)
    trained = idle * (expert.parameters + expert.optimizer)
    gradients = idle * expert.gradients  # that find no room
    assert trained <= most.written - least.written <= 1.01 * (trained + gradients)
    assert least.read < most.read
    assert step_traffic(plan, config, replace(shape, experts_per_token=None), None, few) == (
        step_traffic(plan, config, replace(shape, experts_per_token=None), None, many)
    )


def test_copies_are_those_of_all_experts_in_a_long_run() -> None:
    """Whatever a step touches: the next one touches others."""
    shape = model()
    plan, config = plan_of(shape, **NVME)
    room = 1 << 40
    found = find_copies(plan, config, shape, 1, room)
    parameters = sum(group.parameters for group in plan.groups)
    assert found.by_class[CLASSES[0]] == parameters


# ---------------------------------------------------------------- not one by one
def test_experts_that_stay_with_their_blocks_take_what_these_took() -> None:
    """As micro-batches have it: the same groups and units, in whatever order parameters are."""
    joined, whole = model().joined, model(experts=False)
    assert joined.units == whole.units
    for ours, theirs in zip(joined.groups, whole.groups, strict=True):
        assert ours.layout.numel == theirs.layout.numel
        named = {param.names: param.shape for param in ours.params}
        assert named == {param.names: param.shape for param in theirs.params}
    assert not joined.tables


def test_micro_batches_that_are_open_stay_one_where_experts_move_one_by_one() -> None:
    config = OffloadConfig.load({"micro_batches": "auto"})
    run = RunFacts(Workload(8, 64), SPEEDS, lambda config: FACTS)
    assert {c.micro_batches for c in _choices(config, run, model())} == {1}
    assert {c.micro_batches for c in _choices(config, run, model().joined)} == {1, 2, 4, 8}


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


def assert_a_step_moves_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, config: OffloadConfig
) -> None:
    """In training three blocks of experts, of which all get tokens."""
    let_all_be_done_at_once(monkeypatch)
    torch.manual_seed(0)
    net = nn.Sequential(*(_Block() for _ in range(3)))
    shape = discover(net).shape()
    assert (len(shape.tables), shape.experts_per_token) == (3, 2)
    moved = []
    with offload.initialize(net, config) as engine:
        for _ in range(4):
            engine.module(torch.randn(256, 64)).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.settle()
            moved.append(engine.report().bytes_moved)
        said = step_traffic(engine.plan, engine.config, shape, None, Workload(1, 256)).total
    read, written = (moved[-1][link] - moved[-2][link] for link in ("nvme read", "nvme write"))
    assert said.written == pytest.approx(written, rel=0.03)
    assert said.read == pytest.approx(read, rel=0.06)


def test_a_step_with_experts_moves_the_predicted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"host": "6MiB", "nvme": "1GiB"}
    config = OffloadConfig.load({"budget": budget, "optimizer": {"chunk": 65536}, **NVME})
    assert_a_step_moves_what_is_predicted(monkeypatch, config)
