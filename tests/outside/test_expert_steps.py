"""Packed experts without tokens miss steps, and nobody who looks at a run finds that out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.config.model import OffloadConfig
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded

transformers = pytest.importorskip("transformers")

VOCABULARY, STEPS = 32, 14
Event = Callable[[int, offload.Engine], Tensor | None]


def qwen() -> nn.Module:
    settings = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=16, moe_intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=24, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    made: nn.Module = transformers.Qwen3MoeForCausalLM(settings)
    return made


def experts_of(engine: offload.Engine) -> Any:
    return engine.module.get_submodule("model.layers.0.mlp.experts")


def train(
    folder: Path, placement: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, splits: bool,
    event: Event, **keys: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """All that was seen on the way, and is there in the end. `splits`: an expert is a group of its
    own, else the module is one group whose gradient is zero for experts without tokens."""
    monkeypatch.setattr(OffloadConfig, "splits_experts", lambda self, world=1: splits)
    own = {
        "optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1}, "clip_grad_norm": 1.0,
        **keys,
    }  # fmt: skip
    folder.mkdir()
    generator, draw = torch.Generator().manual_seed(2), random.Random(3)
    found = {}
    with offload.initialize(seeded(qwen), config(folder, placement, **own)) as engine:
        assert any(table.packed for table in engine.runtime.store.tables) == splits
        optimizer = engine.optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            passes = 1 if engine.runtime.stepper.updates_in_backward else draw.choice([1, 2])
            for number in range(passes):
                tokens = torch.randint(VOCABULARY, (1, draw.choice([1, 2])), generator=generator)
                loss = engine.module(input_ids=tokens).logits.float().square().mean()
                engine.backward(loss)
                found[f"loss {step} {number}"] = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            seen = event(step, engine)
            if seen is not None:
                found[f"seen {step}"] = seen
        for name, param in engine.module.named_parameters():
            found[name] = engine.values.full(param)
            for key, value in engine.values.read_state(param).items():
                found[f"{name} {key}"] = value
    return found


def nothing(step: int, engine: offload.Engine) -> None:
    """Nobody looks."""


def look(step: int, engine: offload.Engine) -> Tensor | None:
    """Weights, an evaluation, step counts, moments."""
    experts = experts_of(engine)
    if step % 8 == 1:
        return experts.gate_up_proj[5].clone()
    if step % 8 == 3:
        with torch.no_grad():
            tokens = torch.arange(6).unsqueeze(0)
            logits: Tensor = engine.module(input_ids=tokens).logits
            return logits
    if step % 8 == 5:
        steps: Tensor = engine.values.read_state(experts.down_proj)["step"]
        return steps
    if step % 8 == 7:
        moments: Tensor = engine.values.read_state(experts.down_proj)["exp_avg"]
        return moments
    return None


def disturb(step: int, engine: offload.Engine) -> None:
    """Numbers change, parameters are frozen and written, a gradient is set, states are loaded."""
    group = engine.optimizer.param_groups[0]
    group["weight_decay"], group["betas"] = 0.1 * (step % 3), (0.8, 0.9 if step % 2 else 0.99)
    experts = experts_of(engine)
    experts.down_proj.requires_grad_(not 6 <= step < 9)
    if step == 2:
        experts.gate_up_proj.grad = torch.full_like(experts.gate_up_proj, 0.1)
    if step == 4:
        with torch.no_grad(), engine.gathered([experts.gate_up_proj]):
            experts.gate_up_proj[3].mul_(0.5)
    if step == 10:
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())


IN_BACKWARD = {"clip_grad_norm": None, "optimizer": {"lr": 1e-2, "in_backward": True}}
CASES: list[tuple[dict[str, str], Event, dict[str, Any]]] = [
    (NVME, nothing, {"precision": "bf16"}),
    (HOST, nothing, {"precision": "fp16"}),
    (NVME, look, {}),
    (HOST, look, {}),
    (HOST, disturb, {}),
    (NVME, disturb, {}),
    (HOST, look, IN_BACKWARD),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("placement", "event", "keys"), CASES)
def test_experts_in_groups_of_their_own_change_nothing(
    placement: dict[str, str], event: Event, keys: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    expected = train(tmp_path / "one", HOST, monkeypatch, splits=False, event=event, **keys)
    found = train(tmp_path / "own", placement, monkeypatch, splits=True, event=event, **keys)
    assert_same_bits(found, expected)


def test_rounding_does_not_depend_on_when_a_step_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"precision": "bf16", "optimizer": {"type": "adamw", "lr": 1e-2, "states": "int8"}}
    late = train(tmp_path / "late", NVME, monkeypatch, splits=True, event=nothing, **keys)

    def read_all(step: int, engine: offload.Engine) -> None:
        engine.settle()

    at_once = train(tmp_path / "once", HOST, monkeypatch, splits=True, event=read_all, **keys)
    assert_same_bits(late, at_once)
