"""`memest MODEL --inference`: caches as transformers makes them, one answer in every form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.config import OffloadConfig
from offload.kv.paged_cache import cached_layers
from offload.planning.activations.trace import trace_activations
from offload.planning.plan.estimate import Workload
from offload.tiers.errors import UnsupportedError
from offload.tools.memest.generation import CacheShape, Generation, generation_facts
from tests.tools.test_memest_cli import run

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "all layers slide": ("mistral", {"sliding_window": 8}),
    "every other one slides": ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    "the last ones slide": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "wide heads": ("qwen3", {"head_dim": 32}),
    "experts": ("qwen3_moe", MOE),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128}),
}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "n_routed_experts": 4, "num_key_value_heads": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def built(model_type: str, settings: dict[str, Any]) -> Any:
    sizes = {} if model_type == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **settings})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


# ---------------------------------------------------------------- what is cached
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_as_large_as_a_real_forward_leaves_it(kind: str) -> None:
    told = CacheShape(cached_layers(built(*KINDS[kind])))
    assert told.kept_numel(20) == _kept(*KINDS[kind], length=20)


def test_latent_caches_are_counted_as_they_are_kept() -> None:
    cache = CacheShape(cached_layers(built("deepseek_v3", MLA)))
    assert {layer.token_numel for layer in cache.layers} == {8 + 6}  # the latent, a rotated key
    assert {(layer.heads, layer.key_dim, layer.value_dim) for layer in cache.layers} == {(1, 8, 6)}


def _kept(model_type: str, settings: dict[str, Any], length: int) -> int:
    """Elements that transformers' own cache has behind a real forward."""
    model = transformers.AutoModelForCausalLM.from_config(built(model_type, settings).config)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad():
        cache = model.eval()(tokens, use_cache=True).past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def test_an_encoder_with_a_decoder_is_refused() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    config = OffloadConfig.load({"device": "cpu"})
    with pytest.raises(UnsupportedError, match="has an encoder and a decoder"):
        trace_activations(model, config, Workload(1, 8), trains=False)


def test_the_cache_is_part_of_the_peak_and_of_what_decoding_touches() -> None:
    config = OffloadConfig.load({"precision": "bf16", "device": "cpu"})
    model = built("llama", {})
    cache = CacheShape(cached_layers(model))
    asked = Generation(batch=3, prompt=10, new_tokens=21)
    prefill = trace_activations(model, config, asked.prefill, trains=False)
    decode = trace_activations(model, config, asked.decode, trains=False)
    both = generation_facts(prefill, decode, cache, asked, itemsize=2)
    assert both.peak_nbytes >= 3 * 30 * 4 * 2 * (2 * 2 * 16) + decode.peak_nbytes
    more = both.forward.touched_nbytes - decode.forward.touched_nbytes
    assert more == 3 * 3 * 2 * cache.read_numel(20)


# ---------------------------------------------------------------- the answer
HARDWARE = ["--gpu", "none", "--ram", "16GiB", "--ssd", "Gen4 SSD", "--nvme", "100GiB"]
ASKED = ["--inference", "--batch", "4", "--prompt", "64", "--new-tokens", "33"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    values = built("llama", {}).config.to_dict()
    values |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_every_form_says_the_same(folder: Path, tmp_path: Path, capsys: Any) -> None:
    words = [str(folder), *ASKED, *HARDWARE]
    assert run(*words, "--no-measure", "--format", "json") == 0
    value = json.loads(capsys.readouterr().out)
    asked = value["inference"]
    assert (asked["batch"], asked["prompt"], asked["new_tokens"]) == (4, 64, 33)
    assert asked["cache_nbytes"] == 4 * 96 * asked["cache_nbytes_per_token"]
    assert value["model"]["trainable"] == 0
    assert value["config"]["precision"] == "bf16"  # that of the weights
    held = value["memory"]["host"]["by_class"]
    assert not held.keys() & {"gradients", "optimizer", "master"}
    assert held["kv cache"] > 0
    assert run(*words, "--no-measure") == 0
    table = capsys.readouterr().out
    page = tmp_path / "a.html"
    assert run(*words, "--no-measure", "--out", str(page)) == 0
    for text in ("4 prompts of 64 tokens, 33 new tokens each", "kv cache"):
        assert text in table
        assert text in page.read_text()
    assert "optimizer" not in table


def test_a_written_configuration_is_for_dispatch(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    assert run(str(folder), *ASKED, *HARDWARE, "--no-measure", "--write", str(path)) == 0
    text = path.read_text()
    assert "offload.dispatch(model" in text
    assert "optimizer" not in text.replace("offload generate", "")
    config = OffloadConfig.load(path)
    assert config.precision == "bf16"
    assert config.placement.parameters is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--inference", "--sequence", "8"], "--sequence 8: is of training alone"),
        (["--prompt", "8"], "--prompt 8: is of inference alone; add --inference"),
        (["--inference", "--new-tokens", "0"], "invalid value for '--new-tokens'"),
        (["--inference", "--batch", "100000000"], "tokens in each sequence: at most"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(
    words: list[str], said: str, folder: Path, capsys: Any
) -> None:
    assert run(str(folder), *HARDWARE, "--no-measure", *words) == 2
    assert said in capsys.readouterr().err


def test_weights_in_four_bits_take_a_fraction_of_the_room(folder: Path, capsys: Any) -> None:
    held = []
    for storage in ([], ["-o", "storage={weights: int4, group_size: 32}"]):
        asked = [str(folder), *ASKED, *HARDWARE, "--no-measure", *storage]
        assert run(*asked, "--format", "json") == 0
        value = json.loads(capsys.readouterr().out)
        held.append(value["memory"]["host"]["by_class"]["parameters"])
    assert 0.25 * held[0] < held[1] < 0.5 * held[0]  # the head stays as it is
    assert value["config"]["storage"]["weights"] == "int4"


def test_what_does_not_fit_says_what_would(folder: Path, capsys: Any) -> None:
    tight = ["-o", "budget.host=128KiB", "-o", "placement.parameters=host"]
    assert run(str(folder), *ASKED, *HARDWARE, "--no-measure", *tight, "--format", "json") == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {"placement.parameters": "nvme"} in [change["settings"] for change in changes] or changes
    assert not any(
        "optimizer" in key or "checkpoint" in key for c in changes for key in c["settings"]
    )
