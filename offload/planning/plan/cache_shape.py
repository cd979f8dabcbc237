"""What a model keeps of the tokens it has seen: the cache of keys and values, by layer.

As transformers' `DynamicCache` holds it: a layer of full attention keeps every token, one with a
sliding window the last `window - 1`, one of linear attention a state that does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.zero.kv_sizes import CachedLayer


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """Elements of one sequence."""

    token_numel: int  # of one token: heads x (width of a key + width of a value)
    window: int | None = None  # tokens that attention sees; None: all
    fixed_numel: int = 0  # however long the sequence is
    heads: int = 1  # of keys and values

    def kept_tokens(self, tokens: int) -> int:
        """Between two passes, when `tokens` have been seen."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def kept_numel(self, tokens: int) -> int:
        return self.token_numel * self.kept_tokens(tokens) + self.fixed_numel

    def read_numel(self, tokens: int) -> int:
        """That a pass of one token reads behind `tokens` others."""
        return self.kept_numel(tokens) + self.token_numel

    @property
    def in_tiers(self) -> CachedLayer:
        """As a plan knows it: keys taken to be as wide as values."""
        width = self.token_numel // (2 * self.heads)
        return CachedLayer(self.heads, self.token_numel // self.heads - width, width)


@dataclass(frozen=True)
class CacheShape:
    """Layers in order; those without a cache have none here."""

    layers: tuple[CacheLayer, ...]

    def kept_numel(self, tokens: int) -> int:
        """Of one sequence of `tokens`."""
        return sum(layer.kept_numel(tokens) for layer in self.layers)

    def read_numel(self, tokens: int) -> int:
        """That a pass of one token reads."""
        return sum(layer.read_numel(tokens) for layer in self.layers)

    @property
    def token_numel(self) -> int:
        """Of one token, in all layers."""
        return sum(layer.token_numel for layer in self.layers)

    def largest_numel(self, tokens: int) -> int:
        """Of the layer that keeps most of a sequence of `tokens`."""
        return max((layer.read_numel(tokens) for layer in self.layers), default=0)


def alike(layers: int, layer: CacheLayer) -> CacheShape:
    """A model whose layers keep the same."""
    return CacheShape((layer,) * layers)


def windows_of(
    types: Sequence[str], window: int | None, token_numel: int, heads: int
) -> CacheShape:
    """By transformers' `layer_types`."""
    windows = (window if each == "sliding_attention" else None for each in types)
    return CacheShape(tuple(CacheLayer(token_numel, each, heads=heads) for each in windows))
