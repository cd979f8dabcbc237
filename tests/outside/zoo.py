"""Every causal language model of transformers, built from a tiny random configuration."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
AUTO = importlib.import_module("transformers.models.auto.modeling_auto")
NAMES: dict[str, str] = dict(AUTO.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# One dictionary for all: each configuration takes the keys that it has.
SHRINK: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "n_inner": 48,
    "ffn_dim": 48, "d_ff": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "state_size": 8, "rotary_dim": 4,
    "layer_types": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "layerdrop": 0.0,
    "is_decoder": True, "use_cache": False,
}  # fmt: skip
# Parameters beyond this make a model not tiny: the shrink dictionary does not reach its sizes.
MAX_NUMEL = 3_000_000


def tiny_config(model_type: str) -> Any:
    made = transformers.AutoConfig.for_model(model_type)
    made = getattr(made, "text_config", None) or made
    known = {key: value for key, value in SHRINK.items() if hasattr(made, key)}
    return type(made)(**known)


def build(model_type: str) -> nn.Module:
    """On the meta device first: a model that is not tiny is never allocated."""
    settings = tiny_config(model_type)
    model_class = getattr(transformers, NAMES[model_type])
    with torch.device("meta"):
        numel = sum(p.numel() for p in model_class(copy.deepcopy(settings)).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"{numel} parameters after shrinking")
    torch.manual_seed(0)
    model: nn.Module = model_class(settings)
    return model.float().train()
