"""The modules of the model that `offload train` builds, without building it."""

from __future__ import annotations

from offload.config.training import ModelConfig
from offload.tools.memest.source.tree_pieces import (
    embedding,
    layer_norm,
    linear,
    module,
    repeat,
    tie,
    weights,
)
from offload.zero.module_tree import ModuleTree


def builtin_tree(config: ModelConfig) -> ModuleTree:
    """As `offload.gpt.LanguageModel`."""
    tokens = embedding(config.vocab, config.hidden)
    head = linear(config.hidden, config.vocab)
    tie(config.tied, head, tokens)
    positions = {}
    if config.shape == "gpt":
        positions = {"positions": embedding(config.max_sequence, config.hidden)}
    return module(
        "LanguageModel",
        embedding=tokens,
        **positions,
        layers=repeat(config.layers, lambda layer: _block(config)),
        norm=_norm(config),
        head=head,
    )


def _block(config: ModelConfig) -> ModuleTree:
    hidden, width = config.hidden, config.mlp_width
    kv_width = config.kv_head_count * (hidden // config.heads)
    attention = module(
        "Attention",
        query=linear(hidden, hidden),
        key=linear(hidden, kv_width),
        value=linear(hidden, kv_width),
        output=linear(hidden, hidden),
    )
    gate = {"gate": linear(hidden, width)} if config.shape == "llama" else {}
    mlp = module(
        "GatedMlp" if gate else "GeluMlp",
        **gate,
        up=linear(hidden, width),
        down=linear(width, hidden),
    )
    return module(
        "Block", attention_norm=_norm(config), attention=attention, mlp_norm=_norm(config), mlp=mlp
    )


def _norm(config: ModelConfig) -> ModuleTree:
    return (
        weights("RMSNorm", weight=(config.hidden,))
        if config.shape == "llama"
        else layer_norm(config.hidden)
    )
