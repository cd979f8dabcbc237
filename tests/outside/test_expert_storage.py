"""Packed experts of transformers stored in 4 bits, each by itself: dispatched, and frozen beside
attention that is trained."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.kernels.weight_formats import QuantType, WeightFormat
from tests.offload.engine_cases import HOST, NVME, bits, config, seeded
from tests.offload.storage_cases import dequantized

transformers = pytest.importorskip("transformers")

STORAGE: dict[str, Any] = {"storage": {"weights": "int4", "group_size": 32}}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def mixtral() -> Any:
    settings = transformers.MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = seeded(lambda: transformers.MixtralForCausalLM(settings))
    for name, param in model.named_parameters():
        param.requires_grad_("self_attn" in name)
    return model


@torch.no_grad()
def rounded(model: nn.Module) -> nn.Module:
    """With what codes give: each expert's rows by themselves."""
    format_ = WeightFormat(QuantType.INT4, 32)
    for name, param in model.named_parameters():
        if param.requires_grad or "lm_head" in name or param.dim() == 1:
            continue
        rows = param if param.dim() == 3 else param[None]
        param.copy_(torch.stack([dequantized(row, format_) for row in rows]).view(param.shape))
    return model


def tokens() -> Tensor:
    return torch.arange(24).view(2, 12) * 5 % 64


@pytest.mark.parametrize("kind", ["grouped_mm", "eager"], ids=["one by one", "with their block"])
def test_dispatched_experts_compute_with_dequantized_values(kind: str, tmp_path: Path) -> None:
    model = mixtral().requires_grad_(False).eval()
    model.set_experts_implementation(kind)
    plain = rounded(copy.deepcopy(model))
    offload.dispatch(model, config(tmp_path, {"parameters": "nvme"}, **STORAGE))
    with torch.no_grad(), offload.dispatched(model) as owner:
        actual = model(tokens(), use_cache=False).logits
        expected = plain(tokens(), use_cache=False).logits
        assert bits(actual) == bits(expected)
        assert bits(model.state_dict()[EXPERTS]) == bits(plain.state_dict()[EXPERTS])
        quantized = [group for group in owner.plan.groups if group.dequantized]
        assert len([g for g in quantized if g.table]) == (0 if kind == "eager" else 16)


@pytest.mark.sample("nvme")
@pytest.mark.parametrize("home", [NVME, HOST], ids=["nvme", "host"])
def test_attention_is_trained_on_experts_in_4_bits(home: dict[str, Any], tmp_path: Path) -> None:
    def train(model: Any, **storage: Any) -> tuple[list[float], dict[str, bytes]]:
        with offload.initialize(model, config(tmp_path, home, **storage)) as engine:
            losses = []
            for _ in range(3):
                loss = model(input_ids=tokens(), labels=tokens()).loss
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                losses.append(loss.item())
            engine.save_checkpoint(tmp_path / "checkpoint")
            engine.load_checkpoint(tmp_path / "checkpoint")
            return losses, {name: bits(value) for name, value in model.state_dict().items()}

    assert train(mixtral(), **STORAGE) == train(rounded(mixtral()))
