"""memest counts every causal language model of transformers as the library builds it, and models
whose size is public knowledge as their makers do.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.tools.memest.source.read_model import read_model
from offload.zero.groups.parameter_grouping import group_parameters
from tests.outside.zoo import MAX_NUMEL, NAMES, tiny_config

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def write(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def build(model_type: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and its configuration as the library would save it.

    Real where it can be shrunk to be tiny, else on the meta device, at its default size if need be.
    """
    model_class = getattr(transformers, NAMES[model_type])
    try:
        settings = tiny_config(model_type)
        with torch.device("meta"):
            model = model_class(copy.deepcopy(settings))
    except Exception:  # noqa: BLE001 - the shrink dictionary does not suit every configuration
        settings = transformers.AutoConfig.for_model(model_type)
        with torch.device("meta"):
            model = model_class(copy.deepcopy(settings))
    values = json.loads(settings.to_json_string(use_diff=True))
    if sum(p.numel() for p in model.parameters()) <= MAX_NUMEL:
        model = model_class(settings)
    return model, {**values, "architectures": [NAMES[model_type]]}


@pytest.mark.sample(18)
@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_count_and_groups_equal_the_built_models(model_type: str, tmp_path: Path) -> None:
    try:
        model, values = build(model_type)
    except Exception as error:  # noqa: BLE001 - whatever keeps the library from building it
        pytest.skip(f"{type(error).__name__}: {error}".split("\n")[0][:90])
    source = read_model(write(tmp_path, values))
    assert source.shape.numel == sum(param.numel() for param in model.parameters())
    assert source.shape == group_parameters(model).shape()


def llama_like(
    model_type: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": False,
        **others,
    }  # fmt: skip


DEEPSEEK_V3 = {
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
QWEN3_MOE = {
    "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
    "num_attention_heads": 71, "vocab_size": 65024, "multi_query": True, "parallel_attn": True,
    "new_decoder_architecture": False, "bias": False, "alibi": False,
}  # fmt: skip
FALCON_40B = {
    **FALCON_7B, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_kv_heads": 8, "new_decoder_architecture": True,
}  # fmt: skip
OPT_13B = {
    "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
    "num_attention_heads": 40, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 5120,
}  # fmt: skip
GPT_J = {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400}
GPT_NEOX = {
    "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
    "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112}
STARCODER = {
    "model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
    "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
}  # fmt: skip
GEMMA_2 = {"head_dim": 256, "tie_word_embeddings": True}
TIED = {"tie_word_embeddings": True}

# Elements of the published weights; tied ones once, multi-token prediction (DeepSeek) left out.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (llama_like("llama", 4096, 11008, 32, 32, 32, 32000), 6_738_415_616),
    "Llama-2-13B": (llama_like("llama", 5120, 13824, 40, 40, 40, 32000), 13_015_864_320),
    "Llama-2-70B": (llama_like("llama", 8192, 28672, 80, 64, 8, 32000), 68_976_648_192),
    "Llama-3-8B": (llama_like("llama", 4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "Llama-3-70B": (llama_like("llama", 8192, 28672, 80, 64, 8, 128256), 70_553_706_496),
    "Llama-3.1-405B": (llama_like("llama", 16384, 53248, 126, 128, 8, 128256), 405_853_388_800),
    "Llama-3.2-1B": (
        llama_like("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED), 1_235_814_400,
    ),
    "Mistral-7B": (llama_like("mistral", 4096, 14336, 32, 32, 8, 32000), 7_241_732_096),
    "Mixtral-8x7B": (
        llama_like("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8), 46_702_792_704,
    ),
    "Qwen2.5-7B": (llama_like("qwen2", 3584, 18944, 28, 28, 4, 152064), 7_615_616_512),
    "Qwen3-8B": (
        llama_like("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128), 8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        llama_like("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **QWEN3_MOE), 30_532_122_624,
    ),
    "Gemma-2-2B": (
        {**llama_like("gemma2", 2304, 9216, 26, 8, 4, 256000), **GEMMA_2}, 2_614_341_888,
    ),
    "Gemma-2-9B": (
        {**llama_like("gemma2", 3584, 14336, 42, 16, 8, 256000), **GEMMA_2}, 9_241_705_984,
    ),
    "Phi-2": (llama_like("phi", 2560, 10240, 32, 32, 32, 51200), 2_779_683_840),
    "Phi-3-mini": (llama_like("phi3", 3072, 8192, 32, 32, 32, 32064), 3_821_079_552),
    "OLMo-2-7B": (llama_like("olmo2", 4096, 11008, 32, 32, 32, 100352), 7_298_617_344),
    "DeepSeek-V3": (
        llama_like("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, **DEEPSEEK_V3),
        671_026_419_200 - 58 * 256,  # less the router's correction terms: buffers, not trained
    ),
    "GPT-2 XL": (GPT2_XL, 1_557_611_200),
    "GPT-J-6B": (GPT_J, 6_050_882_784),
    "GPT-NeoX-20B": (GPT_NEOX, 20_554_567_680),
    "OPT-13B": (OPT_13B, 12_853_473_280),
    "BLOOM-176B": (BLOOM, 176_247_271_424),
    "Falcon-7B": (FALCON_7B, 6_921_720_704),
    "Falcon-40B": (FALCON_40B, 41_303_293_952),
    "StarCoder": (STARCODER, 15_517_456_384),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str, tmp_path: Path) -> None:
    values, published = PUBLISHED[name]
    source = read_model(write(tmp_path, values))
    assert source.shape.numel == published
