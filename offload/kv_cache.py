"""transformers' KV caches with their keys and values in tiers.

transformers makes its caches itself, deep inside of `generate` or of a model's forward. What is
exchanged are the layers of a cache (`CacheLayerMixin` is transformers' seam), when a model is
called with it: `DynamicCache`, `StaticCache` and `EncoderDecoderCache` stay what they are, and say
of lengths, masks and windows what transformers has them say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

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
    StaticLayer,
    StaticSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from offload.errors import StateError, UnsupportedError
from offload.zero.kv_pages import KVPages
from offload.zero.kv_sizes import CachedLayer
from offload.zero.kv_store import KVStore

# layer types without keys and values
_STATELESS = ("linear_attention", "conv", "moe", "mlp")


class _Paged(CacheLayerMixin):  # type: ignore[misc]
    """What all layers in tiers have in common. `keys` and `values` are read from the tiers."""

    is_compileable = False

    def _own(self, store: KVStore, name: str, window: int | None = None) -> None:
        self._store, self._name, self._window = store, name, window
        self._hold(store.pages(name, window))

    def _hold(self, pages: KVPages) -> None:
        self._pages = pages
        self._given_back = weakref.finalize(self, self._store.drop, pages)
        self._given_back.atexit = False

    def _after_store(self) -> int | None:
        """Zeros follow up to this length."""
        return None

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
        if not self.is_initialized:
            return None
        return self._pages.read(**which, length=self._after_store())[0]

    @staticmethod
    def _refuse(given: torch.Tensor | None) -> None:
        if given is not None:  # None: as CacheLayerMixin begins
            raise UnsupportedError(
                "keys and values of a KV cache in tiers cannot be replaced; use the cache's own "
                "methods (update, crop, reorder_cache, ...), or remove placement.kv"
            )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def offload(self) -> None:
        """Its home is where the placement says."""

    def prefetch(self) -> None:
        """The trace of the model's uses says when."""

    def reset(self) -> None:
        """Forget all tokens. (transformers' own dynamic layers keep as many, of zeros.)"""
        self._pages.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.get_seq_length() > 0:
            self._pages.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            rows = torch.arange(self._pages.batch).repeat_interleave(repeats)
            self._pages.select(rows)

    def batch_select_indices(self, indices: Any) -> None:
        if self.get_seq_length() > 0:
            if isinstance(indices, torch.Tensor):
                indices = indices.cpu()
            self._pages.select(torch.arange(self._pages.batch)[indices])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Paged:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._hold(self._pages.copied())
        memo[id(self)] = other
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._pages.extend(key_states, value_states)

    def get_seq_length(self) -> int:
        return self._pages.length

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicLayer.crop`: a positive number is the length to crop to."""
        length, tokens_to_remove = self._pages.length, int(tokens_to_remove)  # it may be a tensor
        if tokens_to_remove > 0:
            tokens_to_remove = max(0, length - tokens_to_remove)
        self._pages.drop_last(abs(tokens_to_remove))


class PagedSlidingLayer(_Paged, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A `DynamicSlidingWindowLayer` in tiers: tokens outside of the window are given back."""

    def __init__(self, store: KVStore, name: str, sliding_window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self.cumulative_length = 0
        self._own(store, name, sliding_window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keep = None if self.record_past else self.sliding_window - 1
        whole = self._pages.extend(key_states, value_states, keep=keep)
        self.cumulative_length += key_states.shape[-2]
        return whole

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicSlidingWindowLayer.crop`."""
        length, tokens_to_remove = self.cumulative_length, int(tokens_to_remove)
        if length >= self.sliding_window:
            if not self.record_past:
                raise StateError(
                    f"{self._name}: the window is full and what was before it is gone; call "
                    "activate_past_recording before what is to be cropped"
                )
            if tokens_to_remove > 0:
                raise StateError(
                    f"{self._name}: the window is full: crop takes a negative number, of tokens to "
                    "remove"
                )
        elif tokens_to_remove > 0:
            tokens_to_remove = max(0, length - tokens_to_remove)
        self._pages.drop_last(abs(tokens_to_remove))
        if length < self.sliding_window:
            self.cumulative_length = self._pages.length
            return
        self.cumulative_length = length - abs(tokens_to_remove)
        self._pages.keep_last(self.sliding_window - 1)

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0


class PagedStaticLayer(_Paged, StaticLayer):  # type: ignore[misc]
    """A `StaticLayer` in tiers: what attention gets is as long as it, with zeros at the end."""

    is_compileable = True  # so that masks are made for the whole length

    def __init__(self, store: KVStore, name: str, max_cache_len: int) -> None:
        StaticLayer.__init__(self, max_cache_len)
        self._own(store, name)

    def _after_store(self) -> int:
        return cast(int, self.max_cache_len)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        needed = self._pages.length + key_states.shape[-2]
        if needed > self.max_cache_len:
            raise StateError(
                f"{self._name}: a static cache of {self.max_cache_len} tokens is given "
                f"{needed}; make it longer (max_cache_len)"
            )
        return self._pages.extend(key_states, value_states, length=self.max_cache_len)

    def get_seq_length(self) -> int:
        return self._pages.length


class PagedStaticSlidingLayer(_Paged, StaticSlidingWindowLayer):  # type: ignore[misc]
    """A `StaticSlidingWindowLayer` in tiers: it keeps the last `sliding_window` tokens."""

    is_compileable = True

    def __init__(self, store: KVStore, name: str, window: int) -> None:
        StaticSlidingWindowLayer.__init__(self, max_cache_len=window, sliding_window=window)
        self._own(store, name, window)

    def _after_store(self) -> int:
        return cast(int, self.max_cache_len)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window, count = self.max_cache_len, key_states.shape[-2]
        before = self.cumulative_length_int
        if before >= window:  # the oldest one is not seen any more
            self._pages.keep_last(window - 1)
        length = window if before + count <= window else None
        whole = self._pages.extend(key_states, value_states, keep=window, length=length)
        self.cumulative_length_int += count
        return whole

    def reset(self) -> None:
        super().reset()
        self.cumulative_length_int = 0


# ---------------------------------------------------------------- exchanging layers
def _paged(layer: Any, store: KVStore, name: str) -> CacheLayerMixin:
    """The same layer in tiers, with what it holds; itself where nothing of it is keys or values."""
    kind = type(layer)
    made: Any
    if issubclass(kind, _Paged) or kind is LinearAttentionLayer:
        return layer
    if kind is DynamicLayer:
        made = PagedLayer(store, name)
    elif kind is DynamicSlidingWindowLayer:
        made = PagedSlidingLayer(store, name, layer.sliding_window)
        made.record_past = layer.record_past
    elif kind is StaticLayer:
        made = PagedStaticLayer(store, name, layer.max_cache_len)
    elif kind is StaticSlidingWindowLayer:
        made = PagedStaticSlidingLayer(store, name, layer.max_cache_len)
    else:
        raise UnsupportedError(
            f"{name} is a {kind.__name__}, of which offload knows no place in tiers; use another "
            "cache, or remove placement.kv"
        )
    _take_over(layer, made)
    return made


def _take_over(layer: Any, made: Any) -> None:
    """Keys and values that a layer has already, of a prompt that was computed before."""
    if not layer.is_initialized:
        return
    made.lazy_initialization(layer.keys, layer.values)
    seen = int(layer.get_seq_length())
    held = min(seen, layer.keys.shape[-2])
    if held:
        made.update(layer.keys[:, :, :held], layer.values[:, :, :held])
    for counter in ("cumulative_length", "cumulative_length_int"):
        if isinstance(getattr(made, counter, None), int):
            setattr(made, counter, seen)


class _NewLayers:
    """Makes the layers of a cache that does not know yet how many it has."""

    def __init__(self, store: KVStore, first: int) -> None:
        self._store, self._next = store, first

    def __call__(self) -> PagedLayer:
        self._next += 1
        return PagedLayer(self._store, _name(self._next - 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> _NewLayers:
        return _NewLayers(self._store, self._next)


def _name(layer: int, of: str = "") -> str:
    return f"KV cache, {of}layer {layer}"


def keep_in_tiers(cache: Cache, store: KVStore, of: str = "") -> None:
    """Let `cache` have its keys and values in the tiers of `store`, those too that it has already.
    Doing it again changes nothing.

    UnsupportedError names a layer that cannot be exchanged. Linear attention stays as it is: its
    state has no tokens.
    """
    if isinstance(cache, EncoderDecoderCache):
        keep_in_tiers(cache.self_attention_cache, store)
        keep_in_tiers(cache.cross_attention_cache, store, "cross-attention, ")
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = cast(Any, _NewLayers(store, len(cache.layers)))
    for number, layer in enumerate(cache.layers):
        cache.layers[number] = _paged(layer, store, _name(number, of))
    cache.offloading = False  # transformers' own, to the CPU


def install(model: nn.Module, store: KVStore) -> Callable[[], None]:
    """Keep the caches that `model`, or a transformers model within it, is called with in tiers.
    The result takes that back."""

    def exchange(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                keep_in_tiers(value, store)

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
    """The layers of a transformers model that keep keys and values, as its configuration has them;
    none of another model."""
    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if outermost is None:
        return ()
    config = outermost.config.get_text_config(decoder=True)
    layers = get_layer_types_and_kwargs(config)[0]
    heads = int(config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = CachedLayer(
        getattr(config, "num_key_value_heads", None) or heads,
        # of multi-head latent attention, keys and values are of their own widths
        getattr(config, "qk_head_dim", None) or dim,
        getattr(config, "v_head_dim", None) or dim,
    )
    crossed = layers if outermost.config.is_encoder_decoder else []
    return (layer,) * sum(kind not in _STATELESS for kind in (*layers, *crossed))
