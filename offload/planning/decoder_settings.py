"""How a decoder made of `decoder_modules` runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What a forward depends on beside the shapes of its parameters."""

    heads: int
    kv_heads: int
    head_dim: int
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    experts_per_token: int = 0
    norms_shares: bool = True  # of a token's experts, so that they sum to 1
    masks: int = 1  # that are asked for before the blocks
    rotates_in_fp32: bool = False
    caps_logits: bool = False
