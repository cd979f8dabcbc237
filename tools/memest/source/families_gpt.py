"""GPT-2 and its contemporaries: GPT-Neo, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, StarCoder's first."""

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
)
from offload.zero.module_tree import ModuleTree

_GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "tie_word_embeddings": True,
}  # fmt: skip


def _no_cross_attention(keys: Keys) -> bool:
    return not keys.flag("add_cross_attention")


def _with_head(class_name: str, body: dict[str, ModuleTree], head: ModuleTree) -> ModuleTree:
    return module(class_name, **body, lm_head=head)


def _gpt2(keys: Keys) -> ModuleTree:
    hidden = keys.size("n_embd")
    inner = keys.size_or("n_inner", 4 * hidden)
    tokens = embedding(keys.size("vocab_size"), hidden)

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
    return _with_head("GPT2LMHeadModel", {"transformer": body}, _head(keys, tokens))


def _gpt_bigcode(keys: Keys) -> ModuleTree:
    hidden = keys.size("n_embd")
    inner = keys.size_or("n_inner", 4 * hidden)
    tokens = embedding(keys.size("vocab_size"), hidden)
    head = keys.quotient("n_embd", "n_head")
    kv_width = head if keys.flag("multi_query") else hidden

    def block(layer: int) -> ModuleTree:
        return module(
            "GPTBigCodeBlock",
            ln_1=layer_norm(hidden),
            attn=module(
                "GPTBigCodeAttention",
                c_attn=linear(hidden, hidden + 2 * kv_width, bias=True),
                c_proj=linear(hidden, hidden, bias=True),
            ),
            ln_2=layer_norm(hidden),
            mlp=module(
                "GPTBigCodeMLP",
                c_fc=linear(hidden, inner, bias=True),
                c_proj=linear(inner, hidden, bias=True),
            ),
        )

    body = module(
        "GPTBigCodeModel",
        wte=tokens,
        wpe=embedding(keys.size("n_positions"), hidden),
        h=repeat(keys.layers("n_layer"), block),
        ln_f=layer_norm(hidden),
    )
    return _with_head("GPTBigCodeForCausalLM", {"transformer": body}, _head(keys, tokens))


def _gpt_neo(keys: Keys) -> ModuleTree:
    hidden = keys.size("hidden_size")
    inner = keys.size_or("intermediate_size", 4 * hidden)
    tokens = embedding(keys.size("vocab_size"), hidden)

    def block(layer: int) -> ModuleTree:
        projections = {n: linear(hidden, hidden) for n in ("k_proj", "v_proj", "q_proj")}
        out = linear(hidden, hidden, bias=True)
        return module(
            "GPTNeoBlock",
            ln_1=layer_norm(hidden),
            attn=module(
                "GPTNeoAttention",
                attention=module("GPTNeoSelfAttention", **projections, out_proj=out),
            ),
            ln_2=layer_norm(hidden),
            mlp=module(
                "GPTNeoMLP",
                c_fc=linear(hidden, inner, bias=True),
                c_proj=linear(inner, hidden, bias=True),
            ),
        )

    body = module(
        "GPTNeoModel",
        wte=tokens,
        wpe=embedding(keys.size("max_position_embeddings"), hidden),
        h=repeat(keys.layers("num_layers"), block),
        ln_f=layer_norm(hidden),
    )
    return _with_head("GPTNeoForCausalLM", {"transformer": body}, _head(keys, tokens))


def _gptj(keys: Keys) -> ModuleTree:
    hidden, vocab = keys.size("n_embd"), keys.size("vocab_size")
    inner = keys.size_or("n_inner", 4 * hidden)
    tokens = embedding(vocab, hidden)

    def block(layer: int) -> ModuleTree:
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        return module(
            "GPTJBlock",
            ln_1=layer_norm(hidden),
            attn=module("GPTJAttention", **{name: linear(hidden, hidden) for name in names}),
            mlp=module(
                "GPTJMLP",
                fc_in=linear(hidden, inner, bias=True),
                fc_out=linear(inner, hidden, bias=True),
            ),
        )

    body = module(
        "GPTJModel", wte=tokens, h=repeat(keys.layers("n_layer"), block), ln_f=layer_norm(hidden)
    )
    head = _head(keys, tokens, bias=True)
    return _with_head("GPTJForCausalLM", {"transformer": body}, head)


def _gpt_neox(keys: Keys) -> ModuleTree:
    hidden, inner = keys.size("hidden_size"), keys.size("intermediate_size")
    tokens = embedding(keys.size("vocab_size"), hidden)
    bias = keys.flag("attention_bias")

    def block(layer: int) -> ModuleTree:
        return module(
            "GPTNeoXLayer",
            input_layernorm=layer_norm(hidden),
            post_attention_layernorm=layer_norm(hidden),
            attention=module(
                "GPTNeoXAttention",
                query_key_value=linear(hidden, 3 * hidden, bias=bias),
                dense=linear(hidden, hidden, bias=bias),
            ),
            mlp=_four_h_mlp("GPTNeoXMLP", hidden, inner, bias=True),
        )

    body = module(
        "GPTNeoXModel",
        embed_in=tokens,
        layers=repeat(keys.layers(), block),
        final_layer_norm=layer_norm(hidden),
    )
    return _with_head("GPTNeoXForCausalLM", {"gpt_neox": body}, _head(keys, tokens))


def _bloom(keys: Keys) -> ModuleTree:
    hidden = keys.size("hidden_size")
    tokens = embedding(keys.size("vocab_size"), hidden)

    def block(layer: int) -> ModuleTree:
        return module(
            "BloomBlock",
            input_layernorm=layer_norm(hidden),
            self_attention=module(
                "BloomAttention",
                query_key_value=linear(hidden, 3 * hidden, bias=True),
                dense=linear(hidden, hidden, bias=True),
            ),
            post_attention_layernorm=layer_norm(hidden),
            mlp=_four_h_mlp("BloomMLP", hidden, 4 * hidden, bias=True),
        )

    body = module(
        "BloomModel",
        word_embeddings=tokens,
        word_embeddings_layernorm=layer_norm(hidden),
        h=repeat(keys.layers("n_layer"), block),
        ln_f=layer_norm(hidden),
    )
    return _with_head("BloomForCausalLM", {"transformer": body}, _head(keys, tokens))


def _falcon(keys: Keys) -> ModuleTree:
    hidden = keys.size("hidden_size")
    inner = keys.size_or("ffn_hidden_size", 4 * hidden)
    heads = keys.size("num_attention_heads")
    head = keys.quotient("hidden_size", "num_attention_heads")
    tokens = embedding(keys.size("vocab_size"), hidden)
    bias, newer = keys.flag("bias"), keys.flag("new_decoder_architecture")
    if newer:
        fused = (2 * keys.size_or("num_kv_heads", heads) + heads) * head
    else:
        fused = hidden + 2 * head if keys.flag("multi_query") else 3 * hidden

    def block(layer: int) -> ModuleTree:
        return module(
            "FalconDecoderLayer",
            self_attention=module(
                "FalconAttention",
                query_key_value=_falcon_linear(hidden, fused, bias),
                dense=_falcon_linear(hidden, hidden, bias),
            ),
            mlp=module(
                "FalconMLP",
                dense_h_to_4h=_falcon_linear(hidden, inner, bias),
                dense_4h_to_h=_falcon_linear(inner, hidden, bias),
            ),
            **{name: layer_norm(hidden) for name in _falcon_norms(keys, newer)},
        )

    body = module(
        "FalconModel",
        word_embeddings=tokens,
        h=repeat(keys.layers(), block),
        ln_f=layer_norm(hidden),
    )
    return _with_head("FalconForCausalLM", {"transformer": body}, _head(keys, tokens))


def _falcon_linear(inputs: int, outputs: int, bias: bool) -> ModuleTree:
    tree = linear(inputs, outputs, bias=bias)
    tree.class_name = "FalconLinear"
    return tree


def _falcon_norms(keys: Keys, newer: bool) -> tuple[str, ...]:
    if not keys.flag("parallel_attn"):
        return ("post_attention_layernorm", "input_layernorm")
    count = keys.size_or("num_ln_in_parallel_attn", 2 if newer else 1)
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


def _opt(keys: Keys) -> ModuleTree:
    hidden, inner, vocab = keys.size("hidden_size"), keys.size("ffn_dim"), keys.size("vocab_size")
    width = keys.size_or("word_embed_proj_dim", hidden)
    bias, affine = keys.flag("enable_bias"), keys.flag("layer_norm_elementwise_affine")
    tokens = embedding(vocab, width)
    positions = keys.size("max_position_embeddings") + 2  # the first two are for padding

    def norms(*names: str) -> dict[str, ModuleTree]:
        return {name: layer_norm(hidden) for name in names} if affine else {}

    def block(layer: int) -> ModuleTree:
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        return module(
            "OPTDecoderLayer",
            self_attn=module(
                "OPTAttention", **{name: linear(hidden, hidden, bias=bias) for name in names}
            ),
            **norms("self_attn_layer_norm"),
            fc1=linear(hidden, inner, bias=bias),
            fc2=linear(inner, hidden, bias=bias),
            **norms("final_layer_norm"),
        )

    last = keys.flag("do_layer_norm_before") and not keys.flag("_remove_final_layer_norm")
    projections = {}
    if width != hidden:
        projections = {"project_out": linear(hidden, width), "project_in": linear(width, hidden)}
    decoder = module(
        "OPTDecoder",
        embed_tokens=tokens,
        embed_positions=embedding(positions, hidden, "OPTLearnedPositionalEmbedding"),
        **projections,
        **(norms("final_layer_norm") if last else {}),
        layers=repeat(keys.layers(), block),
    )
    head = linear(width, vocab)
    tie(keys.flag("tie_word_embeddings"), head, tokens)
    return _with_head("OPTForCausalLM", {"model": module("OPTModel", decoder=decoder)}, head)


def _four_h_mlp(class_name: str, hidden: int, inner: int, bias: bool) -> ModuleTree:
    return module(
        class_name,
        dense_h_to_4h=linear(hidden, inner, bias=bias),
        dense_4h_to_h=linear(inner, hidden, bias=bias),
    )


def _head(keys: Keys, tokens: ModuleTree, *, bias: bool = False) -> ModuleTree:
    vocab, hidden = tokens.params["weight"].shape
    head = linear(hidden, vocab, bias=bias)
    tie(keys.flag("tie_word_embeddings"), head, tokens)
    return head


GPT: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", _gpt2, _GPT2, _GPT_ALIASES, _no_cross_attention),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM", _gpt_bigcode, {**_GPT2, "multi_query": True}, _GPT_ALIASES,
        _no_cross_attention,
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM", _gpt_neo,
        {
            "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_size": 2048,
            "num_layers": 24, "num_heads": 16, "tie_word_embeddings": True,
        },
        {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ),
    "gptj": Family(
        "GPTJForCausalLM", _gptj,
        {
            "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16,
            "tie_word_embeddings": False,
        },
        _GPT_ALIASES,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", _gpt_neox,
        {
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
            "num_attention_heads": 64, "intermediate_size": 24576, "attention_bias": True,
            "max_position_embeddings": 2048, "tie_word_embeddings": False,
        },
    ),
    "bloom": Family(
        "BloomForCausalLM", _bloom,
        {
            "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8,
            "tie_word_embeddings": True,
        },
        {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    ),
    "falcon": Family(
        "FalconForCausalLM", _falcon,
        {
            "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
            "num_attention_heads": 71, "multi_query": True, "parallel_attn": True,
            "max_position_embeddings": 2048, "tie_word_embeddings": True,
        },
        {"n_embed": "hidden_size"},
    ),
    "opt": Family(
        "OPTForCausalLM", _opt,
        {
            "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
            "max_position_embeddings": 2048, "do_layer_norm_before": True, "enable_bias": True,
            "layer_norm_elementwise_affine": True, "num_attention_heads": 12,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
