"""Traces of transformers models against real passes: every figure is the same."""

from typing import Any

import pytest
import torch
from torch import nn

from offload.planning.activations.trace import trace_activations
from offload.planning.plan.estimate import Workload
from tests.planning.real_pass import config_of, real_facts

transformers = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZE,
    "gpt2": {
        "n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 256, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 1,
    },
    "qwen2_moe": {
        **SIZE, "num_experts": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "gemma2": {**SIZE, "num_hidden_layers": 10, "head_dim": 16, "sliding_window": 16},
}  # fmt: skip
# layers alternate in gemma2; qwen2_moe routes by values, but its experts run as one grouped product
PASSES = {
    "llama": ("bf16", "selective"),
    "gpt2": ("fp32", True),
    "qwen2_moe": ("fp32", False),
    "gemma2": ("bf16", False),
}


def _built(kind: str, device: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.sample("llama")
@pytest.mark.parametrize("kind", MODELS)
def test_a_trace_equals_a_real_pass(kind: str, long: bool) -> None:
    workload = Workload(4, 40)
    passes = (("fp32", False), PASSES[kind]) if long else (PASSES[kind],)
    for precision, checkpoint in passes:
        config = config_of(precision, checkpoint)
        traced = trace_activations(_built(kind, "meta"), config, workload)
        real = real_facts(_built(kind, "cpu"), config, workload)
        assert traced == real, (precision, checkpoint)
    print(f"{kind}: {len(passes)} traces, largest difference 0 bytes, 0 FLOPs, 0 operations")
