"""Families of decoders whose first answer needs no transformers: how their modules, and the way
they run, differ from Llama's. They are counted without torch, and traced on memest's modules.

All others are built by the library (`transformers_models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.tools.memest.source.config_keys import Keys

# Names of a block's norms: before and after attention, before and after the MLP.
Norms = tuple[str | None, str | None, str | None, str | None]
BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Norms = (
    "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A `model_type`. `defaults` has every key that the family reads, with the library's value.

    Names, shapes and tying are those of transformers' modules (5.17), without modules that have no
    parameters; the operations are theirs, too. Tests build and trace both and compare them.
    """

    prefix: str  # of the names of its classes: Llama
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)  # another name of a key -> the key
    qkv_bias: bool = False  # of queries, keys and values alone, whatever the file says
    head_norms: str = ""  # q_norm and k_norm, over each `head` or over the `width` of all heads
    fused: bool = False  # queries, keys and values are one product; so are gate and up
    norms: Norms = BEFORE
    scaled_embedding: bool = False
    mixture: tuple[str, ...] = ()  # a router and experts instead of the MLP, in module order
    # the values of these keys that are described; others are not
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    ropes: tuple[str, ...] = (
        "default",
        "linear",
        "llama3",
        "yarn",
    )  # the others change as they run
    alternates: bool = False  # every other block sees a window only
    rotates_in_fp32: bool = False

    @property
    def is_gpt2(self) -> bool:
        """Whether it has learned positions, layer norms and Conv1D, in place of Llama's."""
        return self.prefix == "GPT2"

    @property
    def architecture(self) -> str:
        """The class that is trained."""
        return f"{self.prefix}LMHeadModel" if self.is_gpt2 else f"{self.prefix}ForCausalLM"

    def reads(self, key: str) -> bool:
        """Whether the key has a meaning in this family."""
        return key in self.defaults

    def flag(self, keys: Keys, key: str) -> bool:
        return self.reads(key) and keys.flag(key)

    def keys(self, values: Mapping[str, Any], where: str) -> Keys:
        return Keys(values, self.defaults, where, self.aliases)


def _keys(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int | None,
    context: int, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context,
        "tie_word_embeddings": False, "attention_dropout": 0.0, **others,
    }  # fmt: skip


_SILU = {"hidden_act": "silu"}
_BIAS = {"attention_bias": False}
_QWEN = _keys(151936, 4096, 22016, 32, 32, 32, 32768, **_SILU)
_MISTRAL = _keys(32000, 4096, 14336, 32, 32, 8, 131072, **_SILU)

FAMILIES: Mapping[str, Family] = {  # by `model_type`
    "llama": Family(
        "Llama", _keys(32000, 4096, 11008, 32, 32, None, 2048, **_SILU, **_BIAS, mlp_bias=False)
    ),
    "mistral": Family("Mistral", {**_MISTRAL, "sliding_window": 4096}),
    "qwen2": Family("Qwen2", _QWEN, qkv_bias=True),
    "qwen3": Family("Qwen3", {**_QWEN, **_BIAS, "head_dim": 128}, head_norms="head"),
    "olmo2": Family(
        "Olmo2", _keys(50304, 4096, 11008, 32, 32, None, 2048, **_SILU, **_BIAS),
        head_norms="width", norms=AFTER, rotates_in_fp32=True,
    ),
    "phi3": Family(
        "Phi3",
        _keys(
            32064, 3072, 8192, 32, 32, None, 4096, **_SILU, resid_pdrop=0.0, sliding_window=None
        ),
        fused=True, ropes=("default",),
    ),
    "gemma2": Family(
        "Gemma2",
        _keys(
            256000, 2304, 9216, 26, 8, 4, 8192, **_BIAS, head_dim=256, sliding_window=4096,
            final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh",
        ) | {"tie_word_embeddings": True},
        norms=AROUND, scaled_embedding=True, alternates=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    "mixtral": Family(
        "Mixtral",
        {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        aliases={"num_experts": "num_local_experts"}, mixture=("gate", "experts"),
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        _keys(
            151936, 2048, 6144, 24, 32, 4, 32768, **_SILU, **_BIAS, decoder_sparse_step=1,
            mlp_only_layers=None, moe_intermediate_size=768, num_local_experts=128,
            num_experts_per_tok=8, norm_topk_prob=False,
        ),
        aliases={"num_experts": "num_local_experts"}, head_norms="head",
        mixture=("experts", "gate"),
    ),
    "gpt2": Family(
        "GPT2",
        {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_inner": None, "tie_word_embeddings": True, "activation_function": "gelu_new",
            "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
        },
        aliases={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        },
        activation=("activation_function", "gelu_new"),
    ),
}  # fmt: skip
