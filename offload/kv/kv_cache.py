"""transformers' KV caches with their keys and values in tiers.

transformers makes its caches itself, deep inside of `generate` or of a model's forward. The
layers of a cache are exchanged (`CacheLayerMixin` is transformers' seam), when a model is
called with it: `DynamicCache`, `StaticCache` and `EncoderDecoderCache` stay what they are, and say
of lengths, masks and windows what transformers has them say.
"""

from __future__ import annotations

import abc
import copy
import weakref
from collections.abc import Callable, Sequence
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
from offload.zero.kv.kv_pages import KVPages
from offload.zero.kv.kv_sizes import CachedLayer
from offload.zero.kv.kv_store import KVStore

# layer types without keys and values
_STATELESS = ("linear_attention", "conv", "moe", "mlp")


class _Paged(CacheLayerMixin):  # type: ignore[misc]
    """The base of all layers in tiers. `keys` and `values` are read from the tiers."""

    is_compileable = False
    _parts: dict[tuple[int, int], _Paged]

    def _own(self, store: KVStore, name: str, window: int | None = None) -> None:
        self._store, self._name, self._window = store, name, window
        self._parts = {}  # of the batch, where blocks compute it in pieces, by their rows
        self._hold(store.pages(name, window))

    def _hold(self, pages: KVPages) -> None:
        self._pages = pages
        self._given_back = weakref.finalize(self, self._store.drop, pages)
        self._given_back.atexit = False

    def _after_store(self) -> int | None:
        """Return the length up to which zeros follow the tokens; None if none follow."""
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
        layers = self._each()
        if not layers[0].is_initialized:
            return None
        found = [layer._pages.read(**which, length=layer._after_store())[0] for layer in layers]
        return found[0] if len(found) == 1 else torch.cat(found)

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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._join()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._update(key_states, value_states)

    @abc.abstractmethod
    def _update(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def get_seq_length(self) -> int:
        return self._each()[0]._seen()

    def _seen(self) -> int:
        """Return the number of tokens so far, including those outside of a window."""
        return self._pages.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        layer = self._each()[0]
        if layer is not self:
            return layer.get_mask_sizes(query_length)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length)
        return sizes

    def offload(self) -> None:
        """Do nothing: the placement decides where the layer lives."""

    def prefetch(self) -> None:
        """Do nothing: the trace of the model's uses decides when."""

    def reset(self) -> None:
        """Forget all tokens. (transformers' own dynamic layers keep as many, of zeros.)"""
        for layer in self._each():
            layer._reset()

    def _reset(self) -> None:
        self._pages.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.get_seq_length() > 0:
            self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self._join()
            self._select(torch.arange(self._pages.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        if self.get_seq_length() > 0:
            self._join()
            if isinstance(indices, torch.Tensor):
                indices = indices.cpu()
            self._select(torch.arange(self._pages.batch)[indices])

    def _select(self, rows: torch.Tensor) -> None:
        rows = rows.cpu()
        spans = [(rows[start:stop], start, stop) for start, stop in self._parts]
        if not all(((own >= start) & (own < stop)).all() for own, start, stop in spans):
            self._join()  # beams of one sample in two pieces
        if not self._parts:
            self._pages.select(rows)
        for (start, stop), part in self._parts.items():
            part._pages.select(rows[start:stop] - start)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Paged:
        other = self._like()
        other._hold(self._pages.copied())
        other._parts = {rows: copy.deepcopy(part, memo) for rows, part in self._parts.items()}
        memo[id(self)] = other
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{self._name} lives in tiers of this process and cannot be pickled; compute the "
            "prompt again where it is needed, or remove placement.kv"
        )

    # ---------------------------------------------------------------- pieces of the batch
    def of_rows(self, rows: slice, batch: int) -> _Paged:
        """Return a layer of these `rows` of the `batch` alone, which holds them from now on. If
        other rows than before are asked for, or all, parts are joined first."""
        asked = rows.start, rows.stop
        if asked in self._parts:
            return self._parts[asked]
        touched = sorted(
            each for each in self._parts if each[0] < rows.stop and rows.start < each[1]
        )
        if touched and (touched[0][0], touched[-1][1]) == asked:
            part = self._joined(touched)
        else:
            if touched:
                self._join()
            part = self._part(rows)
        part._name = f"{self._name}, rows {rows.start} to {rows.stop - 1}"
        self._parts[asked] = part
        if sum(stop - start for start, stop in self._parts) == batch:
            self._pages.clear()
        return part

    def _each(self) -> list[_Paged]:
        """Return the parts, in their order, or the layer itself."""
        return [self._parts[rows] for rows in sorted(self._parts)] or [self]

    def _like(self) -> _Paged:
        """Return another layer like this one, without pages."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _parts={})
        return other

    def _part(self, rows: slice) -> _Paged:
        part = self._like()
        if self._pages.length:
            part._hold(self._pages.copied())
            part._pages.select(torch.arange(rows.start, rows.stop))
            return part
        known = (layer._pages.page_tokens for layer in (self, *self._parts.values()))
        tokens = next((count for count in known if count is not None), None)
        part._hold(self._store.pages(self._name, self._window, tokens))
        return part

    def _joined(self, rows: Sequence[tuple[int, int]]) -> _Paged:
        """Replace some parts by one that joins them, and return it."""
        parts = [self._parts[each] for each in rows]
        joined = parts[0]._like()
        joined._hold(self._store.pages(self._name, self._window, parts[0]._pages.page_tokens))
        if len({part.get_seq_length() for part in parts}) > 1:
            raise StateError(
                f"{self._name}: pieces of the batch have different lengths, as behind a forward "
                "that was interrupted; make a new cache"
            )
        if parts[0]._pages.batch:
            joined._pages.join([part._pages for part in parts])
        for each in rows:
            self._parts.pop(each)._pages.close()
        return joined

    def _join(self) -> None:
        """Join all parts: the layer is one again."""
        if not self._parts:
            return
        joined, name = self._joined(sorted(self._parts)), self._name
        self._pages.close()
        joined._given_back.detach()
        self.__dict__.update(joined.__dict__, _name=name)
        self._hold(joined._pages)


class PagedLayer(_Paged, DynamicLayer):  # type: ignore[misc]
    """A `DynamicLayer` in tiers."""

    def __init__(self, store: KVStore, name: str) -> None:
        DynamicLayer.__init__(self)
        self._own(store, name)

    def _update(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pages.extend(keys, values)

    def crop(self, tokens_to_remove: int) -> None:
        """Crop as `DynamicLayer.crop` does: a positive number is the length to crop to."""
        length, removed = self.get_seq_length(), int(tokens_to_remove)  # it may be a tensor
        if removed > 0:
            removed = max(0, length - removed)
        for layer in self._each():
            layer._pages.drop_last(abs(removed))


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

    def _seen(self) -> int:
        return self.cumulative_length

    def activate_past_recording(self) -> None:
        self.record_past = True
        for layer in self._parts.values():
            layer.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Crop as `DynamicSlidingWindowLayer.crop` does."""
        for layer in self._each():
            cast(PagedSlidingLayer, layer)._crop(int(tokens_to_remove))

    def _crop(self, removed: int) -> None:
        length = self.cumulative_length
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

    def _reset(self) -> None:
        super()._reset()
        self.cumulative_length = 0


class PagedStaticLayer(_Paged, StaticLayer):  # type: ignore[misc]
    """A `StaticLayer` in tiers: what attention gets is as long as it, with zeros at the end."""

    is_compileable = True  # so that masks are made for the whole length

    def __init__(self, store: KVStore, name: str, max_cache_len: int) -> None:
        StaticLayer.__init__(self, max_cache_len)
        self._own(store, name)

    def _after_store(self) -> int:
        return cast(int, self.max_cache_len)

    def _update(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = self._pages.length + keys.shape[-2]
        if needed > self.max_cache_len:
            raise StateError(
                f"{self._name}: a static cache of {self.max_cache_len} tokens is given "
                f"{needed}; make it longer (max_cache_len)"
            )
        return self._pages.extend(keys, values, length=self.max_cache_len)


class PagedStaticSlidingLayer(_Paged, StaticSlidingWindowLayer):  # type: ignore[misc]
    """A `StaticSlidingWindowLayer` in tiers: it keeps the last `sliding_window` tokens."""

    is_compileable = True

    def __init__(self, store: KVStore, name: str, window: int) -> None:
        StaticSlidingWindowLayer.__init__(self, max_cache_len=window, sliding_window=window)
        self.cumulative_length_int = 0
        self._own(store, name, window)

    def _after_store(self) -> int:
        return cast(int, self.max_cache_len)

    def _update(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window, count = self.max_cache_len, keys.shape[-2]
        before = self.cumulative_length_int
        if before >= window:  # the oldest one is not seen any more
            self._pages.keep_last(window - 1)
        length = window if before + count <= window else None
        whole = self._pages.extend(keys, values, keep=window, length=length)
        self.cumulative_length_int += count
        return whole

    def _seen(self) -> int:
        return self.cumulative_length_int

    def _reset(self) -> None:
        super()._reset()
        self.cumulative_length_int = 0


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
    """Copy the keys and values that a layer has already, from a prompt that was computed before."""
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
        cache.layer_class_to_replicate = cast(Any, _NewLayers(store, len(cache.layers)))
    for number, layer in enumerate(cache.layers):
        cache.layers[number] = _paged(layer, store, _name(number, of))
    cache.offloading = False  # transformers' own, to the CPU


def install(model: nn.Module, store: KVStore) -> Callable[[], None]:
    """Keep the caches that `model`, or a transformers model within it, is called with in tiers.
    Returns a function that undoes this."""

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
    """Return the layers of a transformers model that keep keys and values, by its configuration;
    empty for any other model."""
    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if outermost is None:
        return ()
    config = outermost.config.get_text_config(decoder=True)
    if not hasattr(config, "num_attention_heads"):  # RWKV: states alone
        return ()
    layers = get_layer_types_and_kwargs(config)[0]
    layer = _latent(outermost, config) or _of_heads(config)
    crossed = layers if outermost.config.is_encoder_decoder else []
    return (layer,) * sum(kind not in _STATELESS for kind in (*layers, *crossed))


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
