"""KV caches in tiers against transformers' own: the same tensors after the same operations."""

import copy
import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.cache_utils import Cache, DynamicCache

from offload.errors import StateError, TierFullError
from offload.kv.paged_cache import cached_layers, keep_in_tiers
from offload.tiers.cached_layer import CachedLayer
from offload.tiers.tier import Tier
from tests.offload.kv_cases import Homes

TIERS = {"host": (Tier.HOST,), "nvme": (Tier.NVME,), "mixed": (Tier.NVME, Tier.HOST, Tier.NVME)}
LAYERS, HEADS, DIM = 2, 2, 8
PLAIN = LlamaConfig(num_hidden_layers=LAYERS)
SLIDING = MistralConfig(num_hidden_layers=LAYERS, sliding_window=7)
KINDS: dict[str, Callable[[], Cache]] = {
    "dynamic": DynamicCache,
    "configured": lambda: DynamicCache(config=PLAIN),
    "sliding": lambda: DynamicCache(config=SLIDING),
}


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Callable[..., Homes]]:
    made: list[Homes] = []

    def make(tiers: str, **keys: Any) -> Homes:
        made.append(Homes(tmp_path, TIERS[tiers], **keys))
        return made[-1]

    yield make
    for each in made:
        each.close()


def tokens(draw: random.Random, batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as models give them: not contiguous."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    both = torch.randn(2, batch, count, HEADS, DIM, generator=generator)
    keys, values = both.transpose(2, 3)
    return keys, values


class Pair:
    """A cache of transformers' own, and one in tiers, that get the same calls."""

    def __init__(self, kind: str, store: Any) -> None:
        self.own, self.tiered, self.store = KINDS[kind](), KINDS[kind](), store
        keep_in_tiers(self.tiered, store)
        self.batch = 3

    def both(self, call: Callable[[Cache], Any]) -> Any:
        results = []
        for cache in (self.own, self.tiered):
            try:
                results.append(call(cache))
            except (RuntimeError, AttributeError, StateError) as error:
                results.append(error)
        refused = [isinstance(result, Exception) for result in results]
        assert refused[0] == refused[1], results
        return results

    def update(self, draw: random.Random, count: int) -> None:
        for layer in range(LAYERS):
            keys, values = tokens(draw, self.batch, count)
            own, tiered = self.both(partial(Cache.update, key_states=keys, value_states=values,
                                          layer_idx=layer))  # fmt: skip
            for one, other in zip(own, tiered, strict=True):
                assert torch.equal(one, other)
                assert other.is_contiguous()

    def check(self) -> None:
        for count in (1, 3):
            for layer in range(LAYERS):
                own, tiered = self.both(
                    partial(Cache.get_mask_sizes, query_length=count, layer_idx=layer)
                )
                assert own == tiered
        own, tiered = self.both(lambda cache: int(cache.get_seq_length()))
        assert own == tiered


def step(pair: Pair, draw: random.Random) -> None:
    which = draw.choice(["update", "update", "crop", "reorder", "copy", "record", "reset"])
    if which == "update":
        pair.update(draw, draw.randint(1, 6))
    elif which == "reorder":
        rows = torch.tensor([draw.randrange(pair.batch) for _ in range(pair.batch)])
        pair.both(lambda cache: cache.reorder_cache(rows))
    elif which == "copy":
        pair.tiered = copy.deepcopy(pair.tiered)
    elif not pair.own.get_seq_length():
        pass  # transformers has no more for these
    elif which == "crop":
        count = draw.randint(0, int(pair.own.get_seq_length()) - 1)
        pair.both(lambda cache: cache.crop(-count))
    elif which == "record":
        pair.both(lambda cache: cache.activate_past_recording())


@pytest.mark.sample(4)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_operations_have_the_bits_of_transformers_own(
    kind: str, tiers: str, homes: Callable[..., Homes], long: bool
) -> None:
    here = homes(tiers, host_nbytes=4 << 20)
    for seed in range(40 if long else 2):
        draw = random.Random(seed)
        store = here.store(page_tokens=draw.choice([1, 2, 3, 5]))
        pair = Pair(kind, store)
        for _ in range(40):
            step(pair, draw)
            pair.check()
            here.held()
        pair.update(draw, 1)
        del pair
        gc.collect()
        store.reap()  # what an error of transformers' own has kept until here
    assert here.held() == {"host": 0, "nvme": 0}


LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "first_k_dense_replace": LAYERS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("deepseek_v3", LATENT),
        ("minicpm3", LATENT),
        ("falcon", {"multi_query": True}),
        ("falcon", {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_plans_know_what_layers_keep_of_a_token(kind: str, keys: dict[str, Any]) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    shape |= {"vocab_size": 32, "intermediate_size": 32, "ffn_hidden_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **keys)).eval()
    with torch.no_grad():
        cache = model(torch.arange(3)[None]).past_key_values
    kept = [
        CachedLayer(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in cache.layers
    ]
    assert cached_layers(model) == tuple(kept)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tiers", ["host", "mixed"])
def test_a_cache_is_refused_room_only_where_the_free_bytes_do_not_suffice(
    homes: Any, tiers: str, long: bool
) -> None:
    """Caches of several batches that grow, are cropped, reordered, copied and dropped, in a host
    tier that is too small for all of them."""
    refused: list[tuple[str, int, int]] = []
    for seed in range(60 if long else 4):
        draw = random.Random(seed)
        made: Homes = homes(tiers, host_nbytes=draw.randint(30, 60) << 12)
        store = made.store(page_tokens=draw.choice([2, 3, 5, None]), depth=draw.choice([0, 4]))
        caches: dict[int, tuple[Cache, int]] = {}
        for number in range(80):
            batch = draw.choice([1, 2, 3, 6])
            chosen = draw.choice([*caches, number])
            cache, batch = caches.pop(chosen, (DynamicCache(), batch))
            keep_in_tiers(cache, store)
            try:
                _change(cache, batch, draw)
                caches[chosen] = cache, batch
                if draw.random() < 0.2:
                    caches[number] = copy.deepcopy(cache), batch
            except TierFullError as error:
                refused.append((error.tier, error.needed_nbytes, error.free_nbytes))
                caches.pop(draw.choice([*caches, chosen]), None)
            del cache
        caches.clear()
        gc.collect()
        assert made.held() == {"host": 0, "nvme": 0}
    assert refused
    for tier, needed_nbytes, free_nbytes in refused:
        assert tier == "host"
        assert needed_nbytes > free_nbytes


def _change(cache: Cache, batch: int, draw: random.Random) -> None:
    kind = draw.choice(["update", "update", "update", "reorder", "crop"])
    length = cache.get_seq_length()
    if kind == "update" or not length:
        for layer in range(LAYERS):
            cache.update(*tokens(draw, batch, draw.choice([1, 1, 4, 9, 30])), layer)
    elif kind == "reorder":
        cache.reorder_cache(torch.tensor([draw.randrange(batch) for _ in range(batch)]))
    else:
        cache.crop(max(1, length - draw.randint(1, 20)))
