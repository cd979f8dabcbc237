"""transformers' KV caches with their keys and values in tiers.

transformers makes its caches itself, deep inside of `generate` or of a model's forward. The
layers of a cache are exchanged (`CacheLayerMixin` is transformers' seam), when a model is
called with it: `DynamicCache` and `EncoderDecoderCache` stay what they are, and say of
 lengths, masks and windows what transformers has them say.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from offload.errors import StateError, UnsupportedError
from offload.kv.pages import KVPages
from offload.kv.store import KVStore
from offload.tiers.cached_layer import CachedLayer

# layer types without keys and values
_STATELESS = ("linear_attention", "conv", "moe", "mlp")
_SLIDING = ("sliding_attention", "hybrid_sliding", "chunked_attention")


class _Paged(CacheLayerMixin):  # type: ignore[misc]
    """The base of all layers in tiers. `keys` and `values` are read from the tiers."""

    is_compileable = False

    def _own(self, store: KVStore, name: str, window: int | None = None) -> None:
        self._store, self._name = store, name
        self._hold(KVPages(store, name, window))

    def _hold(self, pages: KVPages) -> None:
        self._pages = pages
        self._given_back = weakref.finalize(self, self._store.drop, pages)
        self._given_back.atexit = False

    # ---------------------------------------------------------------- what transformers asks
    @property
    def keys(self) -> torch.Tensor | None:
        return self._whole(keys=True)

    @keys.setter
    def keys(self, given: torch.Tensor | None) -> None:
        self._refuse(given)

    @property
    def values(self) -> torch.Tensor | None:
        return self._whole(values=True)

    @values.setter
    def values(self, given: torch.Tensor | None) -> None:
        self._refuse(given)

    def _whole(self, **which: bool) -> torch.Tensor | None:
        return self._pages.read(**which)[0] if self.is_initialized else None

    @staticmethod
    def _refuse(given: torch.Tensor | None) -> None:
        if given is not None:  # None: as CacheLayerMixin begins
            raise UnsupportedError(
                "keys and values of a KV cache in tiers cannot be replaced; use the cache's own "
                "methods (update, crop, reorder_cache, reset), or remove placement.kv"
            )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pages.extend(keys, values)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, including those outside of a window."""
        return self._pages.length

    def offload(self) -> None:
        """Do nothing: the placement decides where the layer lives."""

    def prefetch(self) -> None:
        """Do nothing: the trace of the model's uses decides when."""

    def reset(self) -> None:
        """Forget all tokens. (transformers' own dynamic layers keep as many, of zeros.)"""
        self._pages.drop_last(self._pages.length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.get_seq_length() > 0:
            self._pages.select(beam_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Paged:
        other: _Paged = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(vars(self))
        other._hold(self._pages.copied())
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{self._name} lives in tiers of this process and cannot be pickled; compute the "
            "prompt again where it is needed, or remove placement.kv"
        )


class PagedLayer(_Paged, DynamicLayer):  # type: ignore[misc]
    """A `DynamicLayer` in tiers."""

    def __init__(self, store: KVStore, name: str) -> None:
        DynamicLayer.__init__(self)
        self._own(store, name)

    def crop(self, tokens_to_remove: int) -> None:
        """Crop as `DynamicLayer.crop` does: a positive number is the length to crop to."""
        length, removed = self.get_seq_length(), int(tokens_to_remove)  # it may be a tensor
        if removed > 0:
            removed = max(0, length - removed)
        self._pages.drop_last(abs(removed))


class PagedSlidingLayer(_Paged, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A `DynamicSlidingWindowLayer` in tiers: tokens outside of the window are given back."""

    def __init__(self, store: KVStore, name: str, sliding_window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self.cumulative_length = 0
        self._own(store, name, sliding_window)

    def _update(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keep = None if self.record_past else self.sliding_window - 1
        whole = self._pages.extend(keys, values, keep=keep)
        self.cumulative_length += keys.shape[-2]
        return whole

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Crop as `DynamicSlidingWindowLayer.crop` does."""
        length, removed = self.cumulative_length, int(tokens_to_remove)
        if length >= self.sliding_window:
            if not self.record_past:
                raise StateError(
                    f"{self._name}: the window is full and what was before it is gone; call "
                    "activate_past_recording before what is to be cropped"
                )
            if removed > 0:
                raise StateError(
                    f"{self._name}: the window is full: crop takes a negative number, of tokens to "
                    "remove"
                )
        elif removed > 0:
            removed = max(0, length - removed)
        self._pages.drop_last(abs(removed))
        if length < self.sliding_window:
            self.cumulative_length = self._pages.length
            return
        self.cumulative_length = length - abs(removed)
        self._pages.keep_last(self.sliding_window - 1)

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0


# ---------------------------------------------------------------- exchanging layers
def _paged(layer: Any, store: KVStore, name: str) -> CacheLayerMixin:
    """Return the layer in tiers, with its contents; itself if it has no keys or values."""
    kind = type(layer)
    made: Any
    if issubclass(kind, _Paged) or kind is LinearAttentionLayer:
        return layer
    if kind is DynamicLayer:
        made = PagedLayer(store, name)
    elif kind is DynamicSlidingWindowLayer:
        made = PagedSlidingLayer(store, name, layer.sliding_window)
        made.record_past = layer.record_past
    else:
        raise UnsupportedError(
            f"{name} is a {kind.__name__}, of which offload knows no place in tiers; use a "
            "DynamicCache, or remove placement.kv"
        )
    if layer.is_initialized:  # from a prompt that was computed before
        made.lazy_initialization(layer.keys, layer.values)
        seen = int(layer.get_seq_length())
        held = min(seen, layer.keys.shape[-2])
        if held:
            made.update(layer.keys[:, :, :held], layer.values[:, :, :held])
        if isinstance(made, PagedSlidingLayer):
            made.cumulative_length = seen
    return made


def _name(layer: int, of: str = "") -> str:
    return f"KV cache, {of}layer {layer}"


def keep_in_tiers(cache: Cache, store: KVStore, of: str = "") -> None:
    """Keep the keys and values of `cache`, including those that it has already, in the tiers of
    `store`. Calling it again changes nothing.

    Raises UnsupportedError, which names the layer, if one cannot be exchanged. Linear attention
    stays as it is: its state has no tokens.
    """
    if isinstance(cache, EncoderDecoderCache):
        keep_in_tiers(cache.self_attention_cache, store)
        keep_in_tiers(cache.cross_attention_cache, store, "cross-attention, ")
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        numbers = itertools.count(len(cache.layers))
        # a function, which a copy of the cache shares
        cache.layer_class_to_replicate = lambda: PagedLayer(store, _name(next(numbers)))
    for number, layer in enumerate(cache.layers):
        cache.layers[number] = _paged(layer, store, _name(number, of))
    cache.offloading = False  # transformers' own, to the CPU


def install(model: nn.Module, store: KVStore, *, trains: bool = False) -> Callable[[], None]:
    """Keep the caches that `model`, or a transformers model within it, is called with in tiers.
    Returns a function that undoes this. One that `trains` keeps those of calls without gradients:
    other calls are no generation, and the store's fetcher does not learn their order."""

    def exchange(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        if trains and caches:
            if torch.is_grad_enabled():
                return
            store.fetcher.begin_forward()
        for cache in caches:
            keep_in_tiers(cache, store)

    handles = [
        module.register_forward_pre_hook(exchange, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def cached_layers(model: nn.Module) -> tuple[CachedLayer, ...]:
    """Return the layers of a transformers model that keep keys and values, by its configuration;
    empty for any other model."""
    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if outermost is None:
        return ()
    config = outermost.config.get_text_config(decoder=True)
    if not hasattr(config, "num_hidden_layers"):  # BLT: several towers
        return ()
    if not hasattr(config.per_layer_config[0], "num_attention_heads"):  # RWKV: states alone
        return ()
    kinds, settings = get_layer_types_and_kwargs(config)
    latent, layers = _latent(outermost, config), []
    for number, kind in enumerate(kinds):
        if kind not in _STATELESS:
            layer = latent or _of_heads(config.per_layer_config[number])
            window = settings.get("sliding_window") if kind in _SLIDING else None
            layers.append(replace(layer, window=window))
    crossed = layers if outermost.config.is_encoder_decoder else []
    return (*layers, *crossed)


def _latent(model: PreTrainedModel, config: Any) -> CachedLayer | None:
    """Return the cached layer of multi-head latent attention that expands one latent and one
    rotated key per token after the cache; None for other models, also for one with an indexer
    (sparse attention), which expands them before it."""
    expands = any(hasattr(m, "expand_kv") and not hasattr(m, "indexer") for m in model.modules())
    return CachedLayer(1, config.kv_lora_rank, config.qk_rope_head_dim) if expands else None


def _of_heads(config: Any) -> CachedLayer:
    heads = int(config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shared = getattr(config, "multi_query", False)  # of all heads; Falcon's newer models repeat it
    if shared and not getattr(config, "new_decoder_architecture", False):
        return CachedLayer(1, dim, dim)
    return CachedLayer(
        getattr(config, "num_key_value_heads", None) or heads,
        # expanded latents: keys and values are of their own widths
        getattr(config, "qk_head_dim", None) or dim,
        getattr(config, "v_head_dim", None) or dim,
    )
