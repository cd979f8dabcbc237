"""A dispatched model with `micro_batches` computes what it computes without, from one read of each
weight per pass: its blocks compute the pieces of a batch in turn, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
# a model's prefix, its settings, and the classes of its blocks
MODELS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "llama": ("Llama", "ForCausalLM", SHAPE, ["LlamaDecoderLayer"]),
    "sliding window": (
        "Mistral", "ForCausalLM", {**SHAPE, "sliding_window": 6}, ["MistralDecoderLayer"],
    ),
    "experts": (
        "GptOss", "ForCausalLM",
        {**SHAPE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        ["GptOssDecoderLayer"],
    ),
    "states": (
        "Mamba", "ForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8,
         "pad_token_id": 0},
        ["MambaBlock"],
    ),
    "encoder and decoder": (
        "Bart", "ForConditionalGeneration", BART, ["BartEncoderLayer", "BartDecoderLayer"],
    ),
}  # fmt: skip
TOKENS = torch.randint(3, 60, (5, 7), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(TOKENS)
MASK[1, :3] = 0  # padded on the left


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def build(name: str, **settings: Any) -> Any:
    prefix, suffix, shape, _ = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{prefix}Config")(**{**shape, **settings})
    return getattr(transformers, f"{prefix}{suffix}")(made).eval()


def dispatch(folder: Path, model: Any, name: str, pieces: int, home: str = "nvme") -> Any:
    return offload.dispatch(
        model,
        {
            "device": "cpu", "micro_batches": pieces, "groups": {"blocks": MODELS[name][3]},
            "budget": {"host": "64MiB", "nvme": "64MiB"}, "placement": {"parameters": home},
            "nvme": {"paths": [str(folder)]},
        },
    )  # fmt: skip


def generated(model: Any, **how: Any) -> tuple[list[list[int]], Tensor]:
    torch.manual_seed(1)
    keys = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "use_cache": False}
    found = model.generate(
        TOKENS, attention_mask=MASK, return_dict_in_generate=True, output_logits=True, **keys, **how
    )
    return found.sequences.tolist(), torch.stack(found.logits)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_whole_batch(tmp_path: Path, name: str) -> None:
    model = dispatch(tmp_path, build(name), name, 2)
    with offload.dispatched(model):
        expected, logits = generated(build(name))
        found, others = generated(model)
        assert found == expected
        assert torch.allclose(logits, others, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            lambda m: m(TOKENS, output_attentions=True, use_cache=False),
            "attentions of all of them are asked for",
        ),
        (lambda m: m(TOKENS), "a cache of keys and values .* pass use_cache=False"),
    ],
)
def test_what_is_refused(tmp_path: Path, call: Callable[[Any], Any], error: str) -> None:
    model = build("llama", attn_implementation="eager")
    dispatch(tmp_path, model, "llama", 2)
    with offload.dispatched(model), torch.no_grad():
        found = model(TOKENS, output_hidden_states=True, use_cache=False)
        assert found.hidden_states[1].shape[0] == len(TOKENS)
        with pytest.raises(UnsupportedError, match=error):
            call(model)
        assert torch.allclose(found.logits, build("llama")(TOKENS).logits, atol=1e-6)
