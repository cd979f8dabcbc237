"""Every architecture of transformers with experts, trained by the engine with each expert as a
group of its own: the loss and all gradients have the bits of plain PyTorch, which computes with the
default implementation; after two steps weights and optimizer states are those of an engine that
moves a block's experts with the block.

Without --long, one architecture for each way in which experts are computed, each trained in another
way.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from offload.zero.groups import parameter_grouping
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, bits, config, parameters_of
from tests.outside.expert_cases import packed_experts, transformers
from tests.outside.zoo import SHRINK

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

SHARES: dict[str, Any] = {key: {"host": "40%", "nvme": "60%"} for key in NVME}
# Lists of modules, in an encoder and a decoder
LISTS = {"nllb_moe": "NllbMoe", "switch_transformers": "SwitchTransformers"}
# Computed by the model's own code from parameters of all experts: not groups of their own
OWN_CODE: dict[str, tuple[str, dict[str, Any]]] = {
    "aria": ("AriaTextForCausalLM",
             {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "dbrx": ("DbrxForCausalLM",
             {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
              "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4,
                             "moe_top_k": 2}}),
    "jetmoe": ("JetMoeForCausalLM", {"kv_channels": 8}),
    "llama4": ("Llama4ForCausalLM", {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}),
    "longcat_flash": ("LongcatFlashForCausalLM",
                      {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
                       "moe_topk": 2, "num_layers": 1, "num_key_value_heads": 4, "head_dim": 4}),
    "step3p7": ("Step3p7TextModel",
                {"sliding_window": 4, "layer_types": ATTENTION,
                 "mlp_layer_types": ["sparse"] * 2}),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    placement: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    recomputes: bool = False  # by transformers

    @property
    def dtype(self) -> str:
        return "bfloat16" if "precision" in self.keys else "float32"


WAYS = {
    "host": Way(HOST),
    "nvme": Way(NVME),
    "shares": Way(SHARES),
    "transformers recomputes": Way(NVME, recomputes=True),
    "engine recomputes": Way({**SHARES, "activations": {"checkpoint": True}}),
    "bf16": Way(NVME, {"precision": "bf16"}),
}
# With the flags of the decorator, a gate of its own, latent experts, one expert, lists, own code
SAMPLE = (
    "shares-gpt_oss", "engine recomputes-nemotron_h", "transformers recomputes-qwen3_moe",
    "nvme-llama4",
)  # fmt: skip
# Its encoder makes a cache, whatever it is asked for
REFUSED = {("diffusion_gemma", "engine recomputes"): "layers.0 is given a DynamicCache"}


pytestmark = pytest.mark.usefixtures("quiet_transformers", "one_thread")


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


def build_lists(architecture: str, dtype: str) -> nn.Module:
    """Two blocks with experts on each side."""
    kind: Any = getattr(transformers, f"{LISTS[architecture]}ForConditionalGeneration")
    fields = vars(kind.config_class())
    keys = {key: SHRINK[key] for key in SHRINK.keys() & fields.keys()}
    sparse = {key: 1 for key in fields if key.endswith("_sparse_step")}  # every block
    two = dict.fromkeys(
        ("num_decoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers"), 2
    )
    # routers cast their own parameters
    own = {**sparse, **two, "is_decoder": False, "router_dtype": dtype}
    torch.manual_seed(0)
    return kind(kind.config_class(**{**keys, **own}))


def made(architecture: str, way: Way) -> Any:
    if architecture in LISTS:
        model: Any = build_lists(architecture, way.dtype)
    else:
        model = build(architecture, ARCHITECTURES | OWN_CODE)
    if way.recomputes:
        model.gradient_checkpointing_enable()
    return model.to(getattr(torch, way.dtype)).train()


def loss_of(model: Any, number: int) -> Tensor:
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(number))
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens.flip(0)
    torch.manual_seed(number)  # dropout and jitter that no key turns off
    output = model(**inputs)
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return values.float().square().mean()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def states_of(engine: offload.Engine) -> dict[str, Tensor]:
    states = {
        f"{name} {key}": value
        for name, param in engine.module.named_parameters()
        for key, value in engine.values.read_state(param).items()
    }
    return {**states, **parameters_of(engine), **dict(engine.module.named_buffers())}


def compare(
    build_model: Callable[[], Any], loss_of: Callable[[Any, int], Tensor], way: Way, tables: int,
    folder: Path, patch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`tables` modules of experts are parted. `loss_of` a model and the number of the step."""
    patch.setattr(parameter_grouping, "SMALL_UNIT_NUMEL", 0)  # blocks, as in a large model
    plain = build_model()
    expected = loss_of(plain, 0)
    expected.backward()
    settings = config(
        folder, way.placement, budget={"host": "128MiB", "nvme": "256MiB"},
        optimizer={"type": "adamw", "lr": 1e-2, "weight_decay": 0.1}, **way.keys,
    )  # fmt: skip
    results = []
    for min_numel, number in (0, tables), (1 << 40, 0):
        patch.setattr(parameter_grouping, "SMALL_TABLE_NUMEL", min_numel)
        with offload.initialize(build_model(), settings) as engine:
            assert len(engine.store.tables) == number
            result = {}
            for step in range(2):
                loss = loss_of(engine.module, step)
                engine.backward(loss)
                result[f"loss {step}"] = loss.detach()
                gradients = gradients_of(engine.module)
                result |= {f"{name}.grad {step}": each for name, each in gradients.items()}
                if step == 0:
                    assert bits(loss) == bits(expected)
                    assert_same_bits(gradients, gradients_of(plain))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            engine.check_integrity()
            results.append({**result, **states_of(engine)})
    assert_same_bits(*results)


def tables_of(architecture: str, model: nn.Module) -> int:
    if architecture in OWN_CODE:
        return 0
    if architecture in LISTS:
        return 4
    modules = packed_experts(model).values()
    return sum(len(module.down_proj) > 1 for module in modules)  # type: ignore[arg-type]


@pytest.mark.sample(*SAMPLE)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *LISTS, *OWN_CODE])
@pytest.mark.parametrize("way", WAYS)
def test_experts_train_with_the_bits_of_plain_pytorch(
    architecture: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = WAYS[way]
    try:
        tables = tables_of(architecture, made(architecture, chosen))
    except ValueError as error:
        if "gradient checkpointing" not in str(error):
            raise
        pytest.skip(str(error))  # says transformers
    args: Any = (lambda: made(architecture, chosen), loss_of, chosen, tables, tmp_path, monkeypatch)
    if refusal := REFUSED.get((architecture, way)):
        with pytest.raises(UnsupportedError, match=refusal):
            compare(*args)
    else:
        compare(*args)


def with_images() -> Any:
    """A configuration of text is inside of the model's."""
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
        "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    settings = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, image_token_id=60, video_token_id=61,
        vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3VLMoeForConditionalGeneration(settings).train()


def loss_with_an_image(model: Any, number: int) -> Tensor:
    """One of 16 patches: 4 tokens."""
    generator = torch.Generator().manual_seed(number)
    image = torch.tensor([[62, 60, 60, 60, 60, 63]])
    tokens = torch.cat([image, torch.randint(3, 60, (1, 4), generator=generator)], dim=1)
    return model(
        input_ids=tokens, labels=tokens, mm_token_type_ids=(tokens == 60).long(),
        pixel_values=torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
        image_grid_thw=torch.tensor([[1, 4, 4]]), use_cache=False,
    ).loss  # fmt: skip


def test_experts_of_a_model_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAYS["engine recomputes"]
    compare(with_images, loss_with_an_image, way, 2, tmp_path, monkeypatch)


def test_what_the_router_adds_to_the_loss_has_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_model() -> Any:
        model = made("mixtral", WAYS["nvme"])
        model.config.output_router_logits = True
        model.router_aux_loss_coef = 0.5
        for layer in model.model.layers:
            layer.mlp.jitter_noise = 0.2
        return model

    def loss_with_routing(model: Any, number: int) -> Tensor:
        torch.manual_seed(number)
        tokens = torch.arange(3 + number, 11 + number).view(2, 4)
        output = model(input_ids=tokens, labels=tokens)
        assert output.aux_loss > 0
        return output.loss

    compare(build_model, loss_with_routing, WAYS["nvme"], 2, tmp_path, monkeypatch)


@pytest.mark.slow  # reads all of transformers' models
def test_all_architectures_with_packed_experts_are_listed() -> None:
    models = Path(transformers.__file__).parent / "models"
    decorated = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"^@use_experts_implementation", path.read_text(), re.MULTILINE)
    }
    assert decorated == ARCHITECTURES.keys()
