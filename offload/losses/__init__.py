"""Losses of a linear head that never have all logits: `linear_cross_entropy`, and transformers'
causal language models with it (`causal_lm.py`)."""

from offload.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
