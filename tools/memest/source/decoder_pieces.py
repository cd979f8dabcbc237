"""Attention, MLPs and experts of Llama's relatives, by the options in which they differ.

`Piece` takes the keys, the family's prefix of class names (`Llama`) and the number of the layer.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.tools.memest.source.config_keys import Keys
from offload.tools.memest.source.tree_pieces import layer_norm, linear, module, scale, weights
from offload.zero.module_tree import ModuleTree

Piece = Callable[[Keys, str, int], ModuleTree]
Bias = str | bool  # the key that says whether there is one, or always the same


def has(keys: Keys, bias: Bias) -> bool:
    return keys.flag(bias) if isinstance(bias, str) else bias


def kv_heads(keys: Keys) -> int:
    return keys.size_or("num_key_value_heads", keys.size("num_attention_heads"))


def head_dim(keys: Keys) -> int:
    if keys.raw("head_dim") is None:
        return keys.quotient("hidden_size", "num_attention_heads")
    return keys.size("head_dim")


def attention(
    bias: Bias = False,
    out_bias: Bias | None = None,
    *,
    out: str = "o_proj",
    norms: Callable[[Keys, str], dict[str, ModuleTree]] | None = None,
) -> Piece:
    """Query, key, value and output projections. `out_bias`: where it differs from the others."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        hidden, head = keys.size("hidden_size"), head_dim(keys)
        width, kv_width = keys.size("num_attention_heads") * head, kv_heads(keys) * head
        with_bias = has(keys, bias)
        return module(
            f"{prefix}Attention",
            q_proj=linear(hidden, width, bias=with_bias),
            k_proj=linear(hidden, kv_width, bias=with_bias),
            v_proj=linear(hidden, kv_width, bias=with_bias),
            **{out: linear(width, hidden, bias=has(keys, bias if out_bias is None else out_bias))},
            **(norms(keys, prefix) if norms else {}),
        )

    return build


def head_norms(keys: Keys, prefix: str) -> dict[str, ModuleTree]:
    """One scale per element of a head, for queries and for keys."""
    head = head_dim(keys)
    return {n: scale(f"{prefix}RMSNorm", head) for n in ("q_norm", "k_norm")}


def width_norms(keys: Keys, prefix: str) -> dict[str, ModuleTree]:
    """One scale per element of all heads together."""
    head = head_dim(keys)
    widths = {"q_norm": keys.size("num_attention_heads") * head, "k_norm": kv_heads(keys) * head}
    return {name: scale(f"{prefix}RMSNorm", width) for name, width in widths.items()}


def hidden_norms(keys: Keys, prefix: str) -> dict[str, ModuleTree]:
    """As `width_norms`, whatever `head_dim` says."""
    hidden, head = keys.size("hidden_size"), keys.quotient("hidden_size", "num_attention_heads")
    widths = {"q_norm": hidden, "k_norm": kv_heads(keys) * head}
    return {name: scale(f"{prefix}RMSNorm", width) for name, width in widths.items()}


def optional_head_norms(keys: Keys, prefix: str) -> dict[str, ModuleTree]:
    return head_norms(keys, prefix) if keys.flag("use_qk_norm") else {}


def optional_layer_norms(keys: Keys, prefix: str) -> dict[str, ModuleTree]:
    """Phi's: whole layer norms over a head."""
    if not keys.flag("qk_layernorm"):
        return {}
    head = keys.quotient("hidden_size", "num_attention_heads")
    return {name: layer_norm(head) for name in ("q_layernorm", "k_layernorm")}


def optional_grid_norms(keys: Keys, prefix: str) -> dict[str, ModuleTree]:
    """Cohere's: one scale per head and element."""
    if not keys.flag("use_qk_norm"):
        return {}
    counts = {"q_norm": keys.size("num_attention_heads"), "k_norm": kv_heads(keys)}
    return {
        name: weights(f"{prefix}LayerNorm", weight=(count, head_dim(keys)))
        for name, count in counts.items()
    }


def fused_attention(keys: Keys, prefix: str, layer: int) -> ModuleTree:
    """Phi-3's: queries, keys and values of one product."""
    hidden, head = keys.size("hidden_size"), head_dim(keys)
    heads = keys.size("num_attention_heads")
    return module(
        f"{prefix}Attention",
        o_proj=linear(heads * head, hidden),
        qkv_proj=linear(hidden, (heads + 2 * kv_heads(keys)) * head),
    )


def latent_attention(keys: Keys, prefix: str, layer: int) -> ModuleTree:
    """DeepSeek's: keys and values from one narrow latent, queries too unless the rank is null."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    rotary, plain = keys.size("qk_rope_head_dim"), keys.size("qk_nope_head_dim")
    value, rank = keys.size("v_head_dim"), keys.size("kv_lora_rank")
    bias, norm = keys.flag("attention_bias"), f"{prefix}RMSNorm"
    if keys.raw("q_lora_rank") is None:
        query = {"q_proj": linear(hidden, heads * (plain + rotary))}
    else:
        query_rank = keys.size("q_lora_rank")
        query = {
            "q_a_proj": linear(hidden, query_rank, bias=bias),
            "q_a_layernorm": scale(norm, query_rank),
            "q_b_proj": linear(query_rank, heads * (plain + rotary)),
        }
    return module(
        f"{prefix}Attention",
        **query,
        kv_a_proj_with_mqa=linear(hidden, rank + rotary, bias=bias),
        kv_a_layernorm=scale(norm, rank),
        kv_b_proj=linear(rank, heads * (plain + value)),
        o_proj=linear(heads * value, hidden, bias=bias),
    )


def gated_mlp(bias: Bias = False, *, width: str = "intermediate_size") -> Piece:
    """down(act(gate(x)) * up(x))."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        return gated(keys, prefix, keys.size(width), has(keys, bias))

    return build


def gated(keys: Keys, prefix: str, width: int, bias: bool = False) -> ModuleTree:
    hidden = keys.size("hidden_size")
    return module(
        f"{prefix}MLP",
        gate_proj=linear(hidden, width, bias=bias),
        up_proj=linear(hidden, width, bias=bias),
        down_proj=linear(width, hidden, bias=bias),
    )


def fused_mlp(keys: Keys, prefix: str, layer: int) -> ModuleTree:
    """A gated MLP whose gate and up are one product."""
    hidden, width = keys.size("hidden_size"), keys.size("intermediate_size")
    return module(
        f"{prefix}MLP",
        gate_up_proj=linear(hidden, 2 * width),
        down_proj=linear(width, hidden),
    )


def plain_mlp(up: str, down: str, bias: Bias = True) -> Piece:
    """down(act(up(x)))."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        hidden, width = keys.size("hidden_size"), keys.size("intermediate_size")
        inner = {up: linear(hidden, width, bias=has(keys, bias))}
        inner[down] = linear(width, hidden, bias=has(keys, bias))
        return module(f"{prefix}MLP", **inner)

    return build


def experts(keys: Keys, prefix: str, count: int, width: int) -> ModuleTree:
    """All experts' gated MLPs in two tensors."""
    hidden = keys.size("hidden_size")
    return weights(
        f"{prefix}Experts",
        gate_up_proj=(count, 2 * width, hidden),
        down_proj=(count, hidden, width),
    )


def router(keys: Keys, class_name: str, count: int) -> ModuleTree:
    return weights(class_name, weight=(count, keys.size("hidden_size")))


def mixture(
    count_key: str, width_key: str, *, block: str = "SparseMoeBlock", gate_first: bool = True
) -> Piece:
    """A router and experts, in every layer."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        count = keys.size(count_key)
        parts = {
            "gate": router(keys, f"{prefix}TopKRouter", count),
            "experts": experts(keys, prefix, count, keys.size(width_key)),
        }
        order = ("gate", "experts") if gate_first else ("experts", "gate")
        return module(f"{prefix}{block}", **{name: parts[name] for name in order})

    return build


def stepped(sparse: Piece) -> Piece:
    """Qwen's: experts in every `decoder_sparse_step`-th layer but `mlp_only_layers`."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        dense = layer in keys.wholes("mlp_only_layers")
        if dense or (layer + 1) % keys.size("decoder_sparse_step"):
            return gated(keys, prefix, keys.size("intermediate_size"))
        return sparse(keys, prefix, layer)

    return build


def with_gated_shared_expert(sparse: Piece) -> Piece:
    """Qwen2's: one expert more that sees every token, behind a gate."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        block = sparse(keys, prefix, layer)
        width = keys.size("shared_expert_intermediate_size")
        block.children["shared_expert"] = gated(keys, prefix, width)
        block.children["shared_expert_gate"] = linear(keys.size("hidden_size"), 1)
        return block

    return build


def shared_after_dense(block: str, gate: str, bias: Bias = False) -> Piece:
    """DeepSeek's: the first layers dense, then routed experts beside shared ones."""

    def build(keys: Keys, prefix: str, layer: int) -> ModuleTree:
        if layer < keys.count("first_k_dense_replace"):
            return gated(keys, prefix, keys.size("intermediate_size"), has(keys, bias))
        count, width = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
        shared = width * keys.size("n_shared_experts")
        return module(
            f"{prefix}{block}",
            experts=experts(keys, prefix, count, width),
            gate=router(keys, f"{prefix}{gate}", count),
            shared_experts=gated(keys, prefix, shared, has(keys, bias)),
        )

    return build
