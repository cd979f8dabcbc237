"""The modules of the model that `offload train` builds, without building it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.module_tree import ModuleTree, shape_of


def builtin_shape(config: ModelConfig, blocks: Sequence[str] = ()) -> ModelShape:
    """Return the groups and units of the model; if experts are groups of their own, also how many
    compute a token."""
    shape = shape_of(builtin_tree(config), blocks)
    return replace(shape, experts_per_token=config.experts_per_token) if shape.tables else shape


def builtin_tree(config: ModelConfig) -> ModuleTree:
    """Return the modules of `offload.gpt.LanguageModel`."""
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
    hidden = config.hidden
    kv_width = config.kv_head_count * (hidden // config.heads)
    attention = module(
        "Attention",
        query=linear(hidden, hidden),
        key=linear(hidden, kv_width),
        value=linear(hidden, kv_width),
        output=linear(hidden, hidden),
    )
    mlp = _mixture(config) if config.experts else _mlp(config, config.mlp_width)
    return module(
        "Block", attention_norm=_norm(config), attention=attention, mlp_norm=_norm(config), mlp=mlp
    )


def _mixture(config: ModelConfig) -> ModuleTree:
    assert config.experts is not None, "a dense model has none"
    gate = weights("Gate", weight=(config.experts, config.hidden))
    experts = repeat(config.experts, lambda expert: _mlp(config, config.expert_width))
    experts.class_name = "Experts"
    return module("Mixture", gate=gate, experts=experts)


def _mlp(config: ModelConfig, width: int) -> ModuleTree:
    gate = {"gate": linear(config.hidden, width)} if config.shape == "llama" else {}
    return module(
        "GatedMlp" if gate else "GeluMlp",
        **gate,
        up=linear(config.hidden, width),
        down=linear(width, config.hidden),
    )


def _norm(config: ModelConfig) -> ModuleTree:
    return (
        weights("RMSNorm", weight=(config.hidden,))
        if config.shape == "llama"
        else layer_norm(config.hidden)
    )
