"""Experts on nvme train in the least memory that a plan asks for, which is less than the experts of
one block take: with and without recomputation, and to the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import offload
from offload.config import OffloadConfig
from offload.planning.choice.planner import lay_out_plan
from offload.planning.plan.plan import Hardware, needed_nbytes
from offload.tiers.tier import Tier
from offload.zero.groups import discovery
from offload.zero.groups.discovery import discover
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded
from tests.outside.routed_model import EXPERTS, HIDDEN, Call, Routed

LAYERS, TOKENS, STEPS = 2, 16, 2
PLENTY = Hardware(0, 1 << 40, 1 << 40, 1 << 42)


def around_blocks(block: nn.Module, x: Tensor, chosen: Tensor, *, reentrant: bool) -> Tensor:
    if not torch.is_grad_enabled():
        found: Tensor = block(x, chosen)
        return found
    again: Tensor = checkpoint(block, x, chosen, use_reentrant=reentrant)
    return again


# how blocks are called, and the key under `activations`
WAYS: dict[str, tuple[Call | None, bool | str]] = {
    "plain": (None, False),
    "own": (None, True),
    "own, selective": (None, "selective"),
    "torch's": (partial(around_blocks, reentrant=False), False),
    "torch's, reentrant": (partial(around_blocks, reentrant=True), False),
}


@pytest.fixture(autouse=True)
def _experts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SMALL_TABLE_NUMEL", 0)
    monkeypatch.setattr(discovery, "SMALL_UNIT_NUMEL", 0)


def states_of(engine: offload.Engine) -> dict[str, Tensor]:
    """Parameters and moments. All of them at once would not fit into the budget."""
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for number, state in engine.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return found


def run(
    folder: Path, placement: dict[str, Any], way: str, *, packed: bool
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, states, and the bytes that host memory held beside the peak of the plan."""
    call, again = WAYS[way]
    model = seeded(lambda: Routed(LAYERS, packed=packed, call=call))
    kept = {**placement, "activations": {"checkpoint": again}}
    source = config(folder, kept, optimizer={"type": "adamw", "chunk": 1024, "lr": 1e-2})
    needed = 0
    if placement == NVME:
        plan = lay_out_plan(OffloadConfig.load(source), discover(model).shape(), PLENTY)
        needed = needed_nbytes(plan, Tier.HOST)
        source["budget"]["host"] = needed
        # all experts of a block are chosen, and do not fit
        weights = [group.parameters for group in plan.groups if "layers.0.experts" in group.name]
        assert len(weights) == EXPERTS
        assert sum(weights) > needed - plan.staging_buffers * plan.staging_nbytes
    generator = torch.Generator().manual_seed(1)
    losses = []
    with offload.initialize(model, source) as engine:
        for _ in range(STEPS):
            x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
            routing = [
                torch.stack([(torch.arange(2) + token) % EXPERTS for token in range(TOKENS)])
                for _ in range(LAYERS)
            ]
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    losses.append(engine.module(x, routing).square().mean().item())
            loss = engine.module(x, routing).square().mean()
            losses.append(loss.item())
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        tiers = engine.report().tiers
        return losses, states_of(engine), tiers["host"].peak_nbytes - needed


@pytest.mark.sample(10)
@pytest.mark.parametrize("packed", [False, True], ids=["modules", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_the_least_memory_is_enough(tmp_path: Path, way: str, packed: bool, long: bool) -> None:
    expected_losses, expected, _ = run(tmp_path, HOST, way, packed=packed)
    for early in (True, False) if long or way in ("own", "torch's") else (True,):
        with set_checkpoint_early_stop(early):
            losses, states, over = run(tmp_path, NVME, way, packed=packed)
        assert over <= 0
        assert losses == expected_losses
        assert_same_bits(states, expected)
