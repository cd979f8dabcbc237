"""Llama and its relatives: attention and an MLP or experts, each around a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.tools.memest.source import decoder_pieces as pieces
from offload.tools.memest.source.config_keys import Keys
from offload.tools.memest.source.decoder_pieces import (
    Piece,
    attention,
    gated_mlp,
    head_norms,
    mixture,
    stepped,
    width_norms,
    with_gated_shared_expert,
)
from offload.tools.memest.source.family import Family
from offload.tools.memest.source.tree_pieces import (
    embedding,
    layer_norm,
    linear,
    module,
    repeat,
    scale,
    tie,
)
from offload.zero.module_tree import ModuleTree

_ATTENTION = attention("attention_bias")
_MLP = gated_mlp()
_TORCHS = "nn.LayerNorm"
_TWO = ("input_layernorm", "post_attention_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Decoder:
    """How a family's modules differ from Llama's."""

    prefix: str
    attention: Piece = _ATTENTION
    mlp: Piece = _MLP
    norms: tuple[str, ...] = _TWO
    norm: str = "RMSNorm"  # a class of the family's, or torch's, or "" where it has no weights
    final: str = "norm"
    model: str = "Model"
    embedding: str = "Embedding"
    head_bias: bool = False

    def __call__(self, keys: Keys) -> ModuleTree:
        hidden, vocab = keys.size("hidden_size"), keys.size("vocab_size")
        tokens = embedding(vocab, hidden, self.embedding)
        head = linear(hidden, vocab, bias=self.head_bias)
        tie(keys.flag("tie_word_embeddings"), head, tokens)
        model = module(
            f"{self.prefix}{self.model}",
            embed_tokens=tokens,
            layers=repeat(keys.layers(), lambda layer: self._block(keys, layer)),
            **self._norms((self.final,), hidden),
        )
        return module(f"{self.prefix}ForCausalLM", model=model, lm_head=head)

    def _block(self, keys: Keys, layer: int) -> ModuleTree:
        return module(
            f"{self.prefix}DecoderLayer",
            self_attn=self.attention(keys, self.prefix, layer),
            mlp=self.mlp(keys, self.prefix, layer),
            **self._norms(self.norms, keys.size("hidden_size")),
        )

    def _norms(self, names: tuple[str, ...], hidden: int) -> dict[str, ModuleTree]:
        if not self.norm:
            return {}
        if self.norm == _TORCHS:
            return {name: layer_norm(hidden) for name in names}
        return {name: scale(f"{self.prefix}{self.norm}", hidden) for name in names}


def _defaults(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int | None,
    context: int, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context,
        "tie_word_embeddings": False, **others,
    }  # fmt: skip


def _family(decoder: Decoder, defaults: Mapping[str, Any], **others: Any) -> Family:
    return Family(f"{decoder.prefix}ForCausalLM", decoder, defaults, **others)


_LLAMA = _defaults(32000, 4096, 11008, 32, 32, None, 2048)
_MISTRAL = _defaults(32000, 4096, 14336, 32, 32, 8, 131072)
_QWEN = _defaults(151936, 4096, 22016, 32, 32, 32, 32768)
_OLMO = _defaults(50304, 4096, 11008, 32, 32, None, 2048)
_TIED = {"tie_word_embeddings": True}
_NO_BIAS = attention()


def _without_head_norms(keys: Keys) -> bool:
    return not keys.flag("qk_layernorm")


DENSE: dict[str, Family] = {
    "llama": _family(Decoder("Llama", mlp=gated_mlp("mlp_bias")), _LLAMA),
    "mistral": _family(Decoder("Mistral", _NO_BIAS), _MISTRAL),
    "ministral": _family(Decoder("Ministral", _NO_BIAS), _MISTRAL),
    "qwen2": _family(Decoder("Qwen2", attention(True, False)), _QWEN),
    "qwen3": _family(
        Decoder("Qwen3", attention("attention_bias", norms=head_norms)), {**_QWEN, "head_dim": 128}
    ),
    "gemma": _family(
        Decoder("Gemma", embedding="GemmaTextScaledWordEmbedding"),
        _defaults(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, **_TIED),
    ),
    "gemma2": _family(
        Decoder("Gemma2", norms=_FOUR, embedding="Gemma2TextScaledWordEmbedding"),
        _defaults(
            256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, final_logit_softcapping=30.0, **_TIED
        ),
    ),
    "gemma3_text": _family(
        Decoder(
            "Gemma3", attention("attention_bias", norms=head_norms), norms=_FOUR,
            model="TextModel", embedding="Gemma3TextScaledWordEmbedding",
        ),
        _defaults(262208, 2304, 9216, 26, 8, 4, 131072, head_dim=256, **_TIED),
    ),
    "phi": _family(
        Decoder(
            "Phi", attention(True, out="dense", norms=pieces.optional_layer_norms),
            pieces.plain_mlp("fc1", "fc2"), ("input_layernorm",), final="final_layernorm",
            head_bias=True, norm=_TORCHS,
        ),
        _defaults(51200, 2048, 8192, 24, 32, None, 2048),
    ),
    "phi3": _family(
        Decoder("Phi3", pieces.fused_attention, pieces.fused_mlp),
        _defaults(32064, 3072, 8192, 32, 32, None, 4096),
    ),
    "olmo": _family(Decoder("Olmo", norm=""), _OLMO),
    "olmo2": _family(
        Decoder("Olmo2", attention("attention_bias", norms=width_norms), norms=_AFTER), _OLMO
    ),
    "olmo3": _family(
        Decoder("Olmo3", attention("attention_bias", norms=width_norms), norms=_AFTER), _OLMO
    ),
    "starcoder2": _family(
        Decoder(
            "Starcoder2", attention("use_bias"), pieces.plain_mlp("c_fc", "c_proj", "use_bias"),
            norm=_TORCHS,
        ),
        _defaults(49152, 3072, 12288, 30, 24, 2, 4096, use_bias=True, **_TIED),
    ),
    "stablelm": _family(
        Decoder("StableLm", attention("use_qkv_bias", False), norm=_TORCHS),
        _defaults(50304, 2560, 6912, 32, 32, 32, 4096),
        covers=_without_head_norms,
    ),
    "cohere": _family(
        Decoder(
            "Cohere", attention("attention_bias", norms=pieces.optional_grid_norms),
            norms=("input_layernorm",), norm="LayerNorm",
        ),
        _defaults(256000, 8192, 22528, 40, 64, None, 8192, **_TIED),
    ),
    "cohere2": _family(
        Decoder("Cohere2", norms=("input_layernorm",), norm="LayerNorm"),
        _defaults(256000, 8192, 22528, 40, 64, None, 8192, **_TIED),
    ),
    "glm": _family(
        Decoder("Glm", attention("attention_bias", False), pieces.fused_mlp),
        _defaults(151552, 4096, 13696, 40, 32, 2, 131072, head_dim=128, attention_bias=True),
    ),
    "granite": _family(Decoder("Granite", mlp=gated_mlp("mlp_bias")), _LLAMA),
    "smollm3": _family(
        Decoder("SmolLM3", mlp=gated_mlp("mlp_bias")),
        _defaults(128256, 2048, 11008, 36, 16, 4, 32768, **_TIED),
    ),
    "arcee": _family(
        Decoder("Arcee", mlp=pieces.plain_mlp("up_proj", "down_proj", "mlp_bias")),
        _defaults(32000, 2560, 18432, 32, 32, None, 4096),
    ),
}  # fmt: skip

EXPERTS: dict[str, Family] = {
    "mixtral": _family(
        Decoder("Mixtral", _NO_BIAS, mixture("num_local_experts", "intermediate_size")),
        {**_MISTRAL, "num_local_experts": 8},
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen2_moe": _family(
        Decoder(
            "Qwen2Moe", attention("qkv_bias", False),
            stepped(with_gated_shared_expert(mixture("num_experts", "moe_intermediate_size"))),
        ),
        _defaults(
            151936, 2048, 5632, 24, 16, 16, 32768, decoder_sparse_step=1, qkv_bias=True,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        ),
    ),
    "qwen3_moe": _family(
        Decoder(
            "Qwen3Moe", attention("attention_bias", norms=head_norms),
            stepped(mixture("num_local_experts", "moe_intermediate_size", gate_first=False)),
        ),
        _defaults(
            151936, 2048, 6144, 24, 32, 4, 32768, decoder_sparse_step=1,
            moe_intermediate_size=768, num_local_experts=128,
        ),
        aliases={"num_experts": "num_local_experts"},
    ),
    "olmoe": _family(
        Decoder(
            "Olmoe", attention("attention_bias", norms=pieces.hidden_norms),
            mixture("num_experts", "intermediate_size"),
        ),
        _defaults(50304, 2048, 2048, 16, 16, None, 4096, num_experts=64),
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": _family(
        Decoder(
            "DeepseekV2", pieces.latent_attention,
            pieces.shared_after_dense("Moe", "TopkRouter", "mlp_bias"),
        ),
        _defaults(
            102400, 4096, 11008, 32, 32, None, 2048, kv_lora_rank=512, q_lora_rank=1536,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64,
            n_shared_experts=2, moe_intermediate_size=1407, first_k_dense_replace=0,
        ),
        aliases={"num_experts": "n_routed_experts"},
    ),
    "deepseek_v3": _family(
        Decoder(
            "DeepseekV3", pieces.latent_attention, pieces.shared_after_dense("MoE", "TopkRouter")
        ),
        _defaults(
            129280, 7168, 18432, 61, 128, 128, 4096, kv_lora_rank=512, q_lora_rank=1536,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256,
            n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    ),
}  # fmt: skip
