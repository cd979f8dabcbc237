"""The built-in model with experts: its loss, what trains it, and what plans it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import offload
from offload.bench.systems import batch_of
from offload.config import OffloadConfig
from offload.gpt import LanguageModel, Mixture, build_meta_model, evaluating
from offload.train.plain import Plain
from tests.offload.engine_states import assert_same_bits, train_step

MODEL: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 2, "max_sequence": 32, "experts": 12, "expert_mlp": 64,
}  # fmt: skip


def config_of(*overrides: str, **model: Any) -> OffloadConfig:
    train = {"model": {**MODEL, **model}, "batch": 4, "sequence": 16}
    values = {"budget": {"host": "64MiB", "nvme": "64MiB"}, "optimizer": {"lr": 0.01}}
    return OffloadConfig.load({**values, "train": train}, list(overrides))


def made(**model: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config_of(**model).train.model)


def mixtures(model: LanguageModel) -> list[Mixture]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mixture)]


def trained(
    steps: int, *overrides: str, **model: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = config_of(*overrides, **model)
    built = build_meta_model(config)
    losses = []
    with offload.initialize(built, config) as engine:
        for step in range(steps):
            losses.append(train_step(engine.optimizer, built(*batch_of(config, step)).loss))
        engine.check_integrity()
        return losses, {name: value.clone() for name, value in built.state_dict().items()}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_token_is_the_weighted_sum_of_its_experts(k: int) -> None:
    layer = mixtures(made(experts_per_token=k))[0]
    x = torch.randn(2, 5, 32)
    output, balancing = layer(x)
    shares = F.softmax(x @ layer.gate.weight.T, dim=-1)
    best, chosen = shares.topk(k, dim=-1)
    weights = best / best.sum(-1, keepdim=True) if k > 1 else best
    every = torch.stack([expert(x) for expert in layer.experts], dim=2)
    picked = every.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, 32))
    torch.testing.assert_close(output, (picked * weights.unsqueeze(-1)).sum(2))
    load = F.one_hot(chosen, 12).sum(2).float().mean((0, 1))
    torch.testing.assert_close(balancing, 12 / k * (load * shares.mean((0, 1))).sum())


def test_a_training_loss_has_the_balancing_loss_of_the_whole_batch() -> None:
    model = made(experts_per_token=3, aux_loss=0.5)
    inputs, targets = batch_of(config_of(), 0)
    logits: list[torch.Tensor] = []
    for layer in mixtures(model):
        layer.register_forward_pre_hook(
            lambda layer, args: logits.append(args[0].flatten(0, 1) @ layer.gate.weight.T)
        )
    loss = model(inputs, targets).loss
    with evaluating(model):
        alone = model(inputs, targets).loss
    assert model.training
    expected = torch.zeros(())
    for each in logits[:2]:
        chosen = torch.zeros_like(each).scatter(1, each.topk(3).indices, 1.0)
        expected += 12 / 3 * (chosen.mean(0) * F.softmax(each, 1).mean(0)).sum() / 2
    expected = expected.detach()
    assert 0.9 < float(expected) < 2
    torch.testing.assert_close((loss - alone).detach(), 0.5 * expected)
    loss.backward()
    assert mixtures(model)[0].gate.weight.grad is not None
    without = made(experts_per_token=3, aux_loss=0.0)
    assert torch.equal(without(inputs, targets).loss, alone)


NVME = tuple(f"placement.{name}=nvme" for name in ("parameters", "gradients", "optimizer"))


@pytest.mark.sample("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placements_train_with_the_same_bits(precision: str) -> None:
    given = (f"precision={precision}", "clip_grad_norm=1.0")
    losses, weights = trained(3, *given)
    for more in (NVME, (*NVME, "placement.activations.checkpoint=true")):
        others, there = trained(3, *given, *more)
        assert others == losses
        assert_same_bits(weights, there)


def test_plain_pytorch_trains_it_in_16_bits_where_an_expert_has_no_tokens() -> None:
    config = config_of("precision=bf16", experts=48, layers=1)
    plain = Plain(config)
    before = [param.clone() for param in plain.model.parameters()]
    plain.step([batch_of(config, 0)])
    still = [torch.equal(a, b) for a, b in zip(before, plain.model.parameters(), strict=True)]
    assert any(still)
    assert not all(still)
