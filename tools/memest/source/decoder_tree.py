"""The modules of a decoder of a known family: names, shapes and tying, without torch."""

from __future__ import annotations

from offload.tools.memest.source.config_keys import Keys
from offload.tools.memest.source.family import Family
from offload.tools.memest.source.tree_pieces import (
    conv1d,
    embedding,
    layer_norm,
    linear,
    module,
    repeat,
    tie,
    weights,
)
from offload.zero.groups.module_tree import ModuleKind, ModuleTree


def kv_heads(keys: Keys) -> int:
    return keys.size_or("num_key_value_heads", keys.size("num_attention_heads"))


def head_dim(keys: Keys) -> int:
    if keys.raw("head_dim") is None:
        return keys.quotient("hidden_size", "num_attention_heads")
    return keys.size("head_dim")


def decoder_tree(family: Family, keys: Keys) -> ModuleTree:
    """Return the modules of the family's class, sized by `keys`. Raise ConfigError for a wrong
    one."""
    return _gpt2(keys) if family.is_gpt2 else _Decoder(family, keys).tree()


class _Decoder:
    """Builds Llama's modules, or those of a relative."""

    def __init__(self, family: Family, keys: Keys) -> None:
        self.family, self.keys = family, keys
        self.prefix = family.prefix
        self.hidden = keys.size("hidden_size")
        self.head, self.kv_width = head_dim(keys), kv_heads(keys) * head_dim(keys)
        self.width = keys.size("num_attention_heads") * self.head

    def tree(self) -> ModuleTree:
        vocab, scaled = self.keys.size("vocab_size"), self.family.scaled_embedding
        name = f"{self.prefix}TextScaledWordEmbedding" if scaled else "Embedding"
        tokens, head = embedding(vocab, self.hidden, name), linear(self.hidden, vocab)
        tie(self.keys.flag("tie_word_embeddings"), head, tokens)
        model = module(
            f"{self.prefix}Model",
            embed_tokens=tokens,
            layers=repeat(self.keys.layers(), self._block),
            norm=self._norm(self.hidden),
        )
        return module(self.family.architecture, model=model, lm_head=head)

    def _block(self, layer: int) -> ModuleTree:
        return module(
            f"{self.prefix}DecoderLayer",
            self_attn=self._attention(),
            mlp=self._experts() if self._is_sparse(layer) else self._mlp(),
            **{name: self._norm(self.hidden) for name in self.family.norms if name is not None},
        )

    def _norm(self, width: int) -> ModuleTree:
        return weights(f"{self.prefix}RMSNorm", weight=(width,))

    def _attention(self) -> ModuleTree:
        bias = self.family.flag(self.keys, "attention_bias")
        out = {"o_proj": linear(self.width, self.hidden, bias=bias)}
        if self.family.fused:
            all_widths = self.width + 2 * self.kv_width
            return module(
                f"{self.prefix}Attention", **out, qkv_proj=linear(self.hidden, all_widths)
            )
        widths = {"q_proj": self.width, "k_proj": self.kv_width, "v_proj": self.kv_width}
        with_bias = bias or self.family.qkv_bias
        return module(
            f"{self.prefix}Attention",
            **{name: linear(self.hidden, w, bias=with_bias) for name, w in widths.items()},
            **out,
            **self._head_norms(),
        )

    def _head_norms(self) -> dict[str, ModuleTree]:
        if not self.family.head_norms:
            return {}
        whole = self.family.head_norms == "width"
        q_width, k_width = (self.width, self.kv_width) if whole else (self.head, self.head)
        return {"q_norm": self._norm(q_width), "k_norm": self._norm(k_width)}

    def _mlp(self) -> ModuleTree:
        bias, width = self.family.flag(self.keys, "mlp_bias"), self.keys.size("intermediate_size")
        names = {"gate_up_proj": 2} if self.family.fused else {"gate_proj": 1, "up_proj": 1}
        return module(
            f"{self.prefix}MLP",
            **{n: linear(self.hidden, k * width, bias=bias) for n, k in names.items()},
            down_proj=linear(width, self.hidden, bias=bias),
        )

    def _is_sparse(self, layer: int) -> bool:
        """Whether the block has experts; Qwen's may have them in some blocks only."""
        if not self.family.reads("decoder_sparse_step"):
            return bool(self.family.mixture)
        dense = layer in self.keys.wholes("mlp_only_layers")
        return not dense and (layer + 1) % self.keys.size("decoder_sparse_step") == 0

    def _experts(self) -> ModuleTree:
        """Return a router, and all experts' gated MLPs in two tensors."""
        count, own = self.keys.size("num_local_experts"), "moe_intermediate_size"
        width = self.keys.size(own if self.family.reads(own) else "intermediate_size")
        parts = {
            "gate": weights(f"{self.prefix}TopKRouter", weight=(count, self.hidden)),
            "experts": weights(
                f"{self.prefix}Experts",
                gate_up_proj=(count, 2 * width, self.hidden),
                down_proj=(count, self.hidden, width),
            ),
        }
        parts["experts"].kind = ModuleKind.PACKED_EXPERTS
        return module(
            f"{self.prefix}SparseMoeBlock", **{name: parts[name] for name in self.family.mixture}
        )


def _gpt2(keys: Keys) -> ModuleTree:
    hidden, vocab = keys.size("n_embd"), keys.size("vocab_size")
    inner = keys.size_or("n_inner", 4 * hidden)
    tokens, head = embedding(vocab, hidden), linear(hidden, vocab)
    tie(keys.flag("tie_word_embeddings"), head, tokens)

    def block(layer: int) -> ModuleTree:
        return module(
            "GPT2Block",
            ln_1=layer_norm(hidden),
            attn=module(
                "GPT2Attention", c_attn=conv1d(hidden, 3 * hidden), c_proj=conv1d(hidden, hidden)
            ),
            ln_2=layer_norm(hidden),
            mlp=module("GPT2MLP", c_fc=conv1d(hidden, inner), c_proj=conv1d(inner, hidden)),
        )

    body = module(
        "GPT2Model",
        wte=tokens,
        wpe=embedding(keys.size("n_positions"), hidden),
        h=repeat(keys.layers("n_layer"), block),
        ln_f=layer_norm(hidden),
    )
    return module("GPT2LMHeadModel", transformer=body, lm_head=head)
