"""Every architecture of transformers with packed experts computes the loss and all gradients of its
default implementation, to the bit, with each expert's slices as leaves.

Without --long, one architecture for each way in which such experts are computed.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.outside.expert_cases import equal_or_no_tokens, packed_experts, sliced, transformers
from tests.outside.test_causal_lm_zoo import SHRINK
from tests.outside.trainer_cases import quiet

ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
SPARSE: dict[str, Any] = {"mlp_layer_types": ["sparse"] * 2, "first_k_dense_replace": 0}
ATTENTION = ["sliding_attention", "full_attention"]
# The model's class, in the file of its architecture, and what the shrunk configuration lacks.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", {}),
    "axk1": ("AXK1ForCausalLM", {}),
    "axk2": ("AXK2ForCausalLM", ALL_HEADS),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    "deepseek_ocr2": ("DeepseekOcr2TextModel", SPARSE),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 0, "head_dim": 4}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", SPARSE | ALL_HEADS),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {}),
    "diffusion_gemma": ("DiffusionGemmaEncoderTextModel",
                        {"top_k_experts": 2, "layer_types": ATTENTION}),
    "dots1": ("Dots1ForCausalLM", {"first_k_dense_replace": 1, "n_shared_experts": 1}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeTextModel",
                        {"moe_intermediate_size": [16, 16], "head_dim": 128} | SPARSE),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "gemma4": ("Gemma4TextModel",
               {"enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 8, "layer_types": ATTENTION}),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", ALL_HEADS),
    "glm4v_moe": ("Glm4vMoeTextModel", {"first_k_dense_replace": 0, "head_dim": 128}),
    "glm5_next": ("Glm5NextTextModel",
                  {"qk_rope_head_dim": 0, "linear_num_heads": 2} | SPARSE | ALL_HEADS),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", SPARSE | ALL_HEADS),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM",
                         {"layer_types": ["attention"] * 2, "mamba_n_heads": 4}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "hy_v3": ("HYV3ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {}),
    "inkling": ("InklingForCausalLM", {}),
    "jamba": ("JambaForCausalLM", {"use_mamba_kernels": False}),
    "kimi_linear": ("KimiLinearForCausalLM", {"linear_num_heads": 4}),
    "laguna": ("LagunaForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM",
                 {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0}),
    "mellum": ("MellumForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
    "minimax": ("MiniMaxForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "nemotron_h": ("NemotronHForCausalLM", {"layers_block_type": ["moe", "attention"]}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterModel",
                              {"layer_types": ATTENTION, "experts_implementation": "grouped_mm"}),
    "phimoe": ("PhimoeForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextModel", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextModel", {}),
    "qwen4_exp": ("Qwen4ExpForCausalLM", {}),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "zaya": ("ZayaForCausalLM", {"num_experts_per_tok": 1}),
}  # fmt: skip
# With the flags of the decorator, a gate of its own, no gate at all, latent experts, one expert
SAMPLE = ("gpt_oss", "deepseek_v4", "nemotron_h", "openai_privacy_filter", "qwen3_moe", "zaya")


@pytest.fixture(autouse=True)
def _quiet_and_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet():
        yield
    torch.set_num_threads(threads)


def build(
    architecture: str, kinds: Mapping[str, tuple[str, dict[str, Any]]] = ARCHITECTURES
) -> nn.Module:
    name, extra = kinds[architecture]
    file = f"transformers.models.{architecture}.modeling_{architecture}"
    model_class = getattr(importlib.import_module(file), name)
    config_class = model_class.config_class
    fields = {*inspect.signature(config_class.__init__).parameters}
    fields |= set(getattr(config_class, "attribute_map", {}))
    known = {key: SHRINK[key] for key in SHRINK.keys() & fields - {"layer_types"}}
    torch.manual_seed(0)
    model: nn.Module = model_class(config_class(**{**known, **extra}))
    return model.float().train()


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    torch.manual_seed(1)
    found = model(input_ids=tokens)
    values = found.logits if hasattr(found, "logits") else found.last_hidden_state
    loss = values.float().square().mean()
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slices_give_the_bits_of_the_default(architecture: str, long: bool) -> None:
    if not long and architecture not in SAMPLE:
        pytest.skip("one of each kind: --long has all")
    model = build(architecture)
    modules = packed_experts(model)
    assert modules
    expected_loss, expected = loss_and_gradients(model)
    with sliced(list(modules.values())) as made:
        loss, found = loss_and_gradients(model)
    assert torch.equal(loss, expected_loss)
    for (name, module), slices in zip(modules.items(), made, strict=True):
        # experts of images are not called
        assert slices.announced == [slices.used] or not [*slices.announced, *slices.used]
        for parameter, _ in module.named_parameters():
            assert found[f"{name}.{parameter}"] is None  # nothing reads it
            found[f"{name}.{parameter}"] = slices.gradient(parameter)
    wrong = [name for name in found if not equal_or_no_tokens(found[name], expected[name])]
    assert not wrong, f"{len(wrong)} of {len(found)} gradients differ: {wrong[:4]}"


def test_all_architectures_with_packed_experts_are_listed(long: bool) -> None:
    if not long:
        pytest.skip("reads all of transformers' models: --long")
    models = Path(transformers.__file__).parent / "models"
    decorated = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"^@use_experts_implementation", path.read_text(), re.MULTILINE)
    }
    assert decorated == ARCHITECTURES.keys()
