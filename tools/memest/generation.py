"""Text generation: what is asked for, what layers cache, and what its passes take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.config import OffloadConfig
from offload.config.training import MAX_TOKENS
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import Workload
from offload.tiers.cached_layer import CachedLayer
from offload.tiers.errors import ConfigError
from offload.zero.groups.model_shape import ModelShape

_USUAL = {"batch": 1, "prompt": 512, "new tokens": 128}
# A pass of one token reads a layer's cache and writes it anew, one token longer; attention reads
# that (`DynamicLayer.update`).
_CACHE_PASSES = 3


@dataclass(frozen=True, slots=True)
class Generation:
    """The arguments of `generate`: a pass over the prompts, which yields the first new token, then
    a pass of one token per sequence for each further one."""

    batch: int  # sequences
    prompt: int  # tokens of each
    new_tokens: int  # to be generated for each

    @classmethod
    def asked(cls, *numbers: int | None) -> tuple[Generation, tuple[str, ...]]:
        """Return a generation of `batch`, `prompt` and `new_tokens`, with usual numbers for those
        that are None, and a note for each. Raise ConfigError, naming the option, for a number out
        of range."""
        known, notes = [], []
        for (name, usual), number in zip(_USUAL.items(), numbers, strict=True):
            if number is None:
                notes.append(f"{name}: {usual}, as none was asked for")
            elif number < 1:
                raise ConfigError(f"--{name.replace(' ', '-')} {number}: at least 1")
            known.append(usual if number is None else number)
        generation = cls(*known)
        if generation.batch * generation.context > MAX_TOKENS:
            raise ConfigError(
                f"--batch {generation.batch} with {generation.context:,} tokens in each sequence: "
                f"at most {MAX_TOKENS:,} together"
            )
        return generation, tuple(notes)

    @property
    def prefill(self) -> Workload:
        return Workload(self.batch, self.prompt)

    @property
    def decode(self) -> Workload:
        """The input of a pass after the first one."""
        return Workload(self.batch, 1)

    @property
    def usual(self) -> Workload:
        """The input of the most frequent pass."""
        return self.decode if self.new_tokens > 1 else self.prefill

    @property
    def context(self) -> int:
        """The tokens of each sequence in the final cache; the last token is in no pass."""
        return self.prompt + self.new_tokens - 1


def _kept_numel(layer: CachedLayer, tokens: int) -> int:
    """The elements of a layer kept between two passes, when `tokens` have been seen."""
    return layer.token_numel * (tokens if layer.window is None else min(tokens, layer.window - 1))


@dataclass(frozen=True)
class CacheShape:
    """The layers that cache keys and values, in order.

    As transformers' `DynamicCache`: a layer of full attention keeps every token, one with a sliding
    window the last `window - 1`. The states of linear attention, which do not grow, are left out.
    """

    layers: tuple[CachedLayer, ...]

    def kept_numel(self, tokens: int) -> int:
        """The elements that are kept of one sequence of `tokens`."""
        return sum(_kept_numel(layer, tokens) for layer in self.layers)

    def read_numel(self, tokens: int) -> int:
        """The elements that a pass of one token reads."""
        return self.kept_numel(tokens) + self.token_numel

    @property
    def token_numel(self) -> int:
        """The elements of one token in all layers."""
        return sum(layer.token_numel for layer in self.layers)


def kv_in_tiers(
    config: OffloadConfig, model: ModelShape, cache: CacheShape | None, batch: int, tokens: int
) -> tuple[OffloadConfig, ModelShape]:
    """Return `config` and `model` with room for caches of `batch` sequences of `tokens` each, if
    caches are in tiers and `kv.tokens` is not given."""
    if config.placement.kv is None or cache is None:
        return config, model
    layers = tuple(layer for layer in cache.layers if layer.token_numel)
    if config.kv.tokens is None:
        known = config.kv.model_copy(update={"tokens": batch * tokens})
        config = config.model_copy(update={"kv": known})
    return config, replace(model, cached=layers)


def generation_facts(
    prefill: ActivationFacts, decode: ActivationFacts, cache: CacheShape,
    generation: Generation, itemsize: int, *, in_tiers: bool = False,
) -> ActivationFacts:  # fmt: skip
    """Return the memory of both passes with the cache at its largest, and the work of `decode`
    behind half of the new tokens. The passes are traced without a cache; `itemsize` is the bytes of
    an element of it, and a cache `in_tiers` is in no peak."""
    element = generation.batch * itemsize
    first, last = generation.prompt, generation.context
    touched = _CACHE_PASSES * element * cache.read_numel((first + last) // 2)
    decode = replace(
        decode,
        forward=replace(decode.forward, touched_nbytes=decode.forward.touched_nbytes + touched),
    )
    before, after = (element * cache.kept_numel(tokens) for tokens in (first, last))
    # the layer at work has its cache twice, before and behind the new token
    reads = (_kept_numel(layer, last) + layer.token_numel for layer in cache.layers)
    copied = element * max(reads, default=0)
    if in_tiers:
        before = after = copied = 0
    prefill_nbytes, decode_nbytes = prefill.peak_nbytes + before, decode.peak_nbytes + copied
    peak = max(prefill_nbytes, decode_nbytes + after)
    heap = max(prefill.heap_peak_nbytes, decode.heap_peak_nbytes)
    return replace(
        decode, peak_nbytes=peak, peak_elsewhere_nbytes=peak,
        heap_peak_nbytes=heap, heap_peak_elsewhere_nbytes=heap,
        cache_nbytes=before if peak == prefill_nbytes else after,
    )  # fmt: skip
