"""The memory and work of generating text, without the weights: the facts of its two kinds of pass,
and the cache of keys and values that grows with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.kv_plan import CacheShape, KVTraffic, kv_traffic
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.plan.workload import Generation, Workload

if TYPE_CHECKING:
    from offload.config import OffloadConfig

ForwardOf = Callable[["OffloadConfig", Workload], ActivationFacts]  # a pass without gradients

# A pass of one token reads a layer's cache and writes it anew, one token longer; attention reads
# that (`DynamicLayer.update`).
_CACHE_PASSES = 3


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """The passes at a batch size. `peak` covers both, with the cache at its largest."""

    prefill: ActivationFacts
    decode: ActivationFacts  # behind half of the new tokens
    peak: ActivationFacts  # memory of both, the work of `decode`
    cache_nbytes: int  # in the end; part of the peak


class GenerationFactsOf:
    """The `GenerationFacts` of one model, computed once per combination of what they depend on."""

    def __init__(self, forward: ForwardOf, cache: CacheShape | None) -> None:
        """`cache` is None if the model's cache is not known."""
        self._forward = forward
        self.cache = cache
        self._found: dict[object, ActivationFacts] = {}

    def __call__(self, config: OffloadConfig, generation: Generation) -> GenerationFacts:
        """Return the facts of `generation` under `config`, which is settled."""
        prefill, decode = (
            self._pass(config, each) for each in (generation.prefill, generation.decode)
        )
        itemsize, cache = ITEMSIZE[config.precision], self.cache or CacheShape(())
        held = kv_traffic(config, cache, generation.batch, generation.context, itemsize)
        return generation_facts(prefill, decode, cache, generation, itemsize, held)

    def _pass(self, config: OffloadConfig, workload: Workload) -> ActivationFacts:
        """Trace a pass, once per precision, micro_batches and workload."""
        key = config.precision, config.micro_batches, workload
        if key not in self._found:
            self._found[key] = self._forward(config, workload)
        return self._found[key]


def generation_facts(
    prefill: ActivationFacts, decode: ActivationFacts, cache: CacheShape,
    generation: Generation, itemsize: int, held: KVTraffic | None = None,
) -> GenerationFacts:  # fmt: skip
    """Add a cache to `prefill` and `decode`, which are traced without one. `itemsize` is the bytes
    of a cache element; `held` is given if the cache lives in tiers."""
    element = generation.batch * itemsize
    first, last = generation.prompt, generation.context
    touched = _CACHE_PASSES * element * cache.read_numel((first + last) // 2)
    decode = replace(
        decode,
        forward=replace(
            decode.forward, touched_nbytes=decode.forward.touched_nbytes + touched
        ),
    )  # fmt: skip
    before, after = (element * cache.kept_numel(tokens) for tokens in (first, last))
    # the layer at work has its cache twice, before and behind the new token
    copied = element * cache.largest_numel(last)
    if held is not None:
        before = after = copied = 0
    prefill_nbytes, decode_nbytes = prefill.peak_nbytes + before, decode.peak_nbytes + copied
    peak = max(prefill_nbytes, decode_nbytes + after)
    heap = max(prefill.heap_peak_nbytes, decode.heap_peak_nbytes)
    both = replace(
        decode, peak_nbytes=peak, peak_elsewhere_nbytes=peak,
        peak_at=prefill.peak_at if peak == prefill_nbytes else decode.peak_at,
        heap_peak_nbytes=heap, heap_peak_elsewhere_nbytes=heap, kv=held,
        cache_nbytes=before if peak == prefill_nbytes else after,
    )  # fmt: skip
    first_pass = replace(prefill, kv=held.of_prefill if held is not None else None)
    return GenerationFacts(first_pass, replace(decode, kv=held), both, after)
