"""The shape of the cache of keys and values that a model keeps of the tokens it has seen, by layer.

It is that of transformers' `DynamicCache`: a layer of full attention keeps every token, one with a
sliding window the last `window - 1`, one of linear attention a state that does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.zero.kv.sizes import CachedLayer


@dataclass(frozen=True)
class CacheShape:
    """The caches of the layers in order; layers without a cache are left out."""

    layers: tuple[CachedLayer, ...]

    def kept_numel(self, tokens: int) -> int:
        """The elements that are kept of one sequence of `tokens`."""
        return sum(layer.kept_numel(tokens) for layer in self.layers)

    def read_numel(self, tokens: int) -> int:
        """The elements that a pass of one token reads."""
        return sum(layer.read_numel(tokens) for layer in self.layers)

    @property
    def token_numel(self) -> int:
        """The elements of one token in all layers."""
        return sum(layer.token_numel for layer in self.layers)

    def largest_numel(self, tokens: int) -> int:
        """The elements of the layer that keeps most of a sequence of `tokens`."""
        return max((layer.read_numel(tokens) for layer in self.layers), default=0)


def alike(layers: int, layer: CachedLayer) -> CacheShape:
    """The cache of a model whose layers all keep the same."""
    return CacheShape((layer,) * layers)
