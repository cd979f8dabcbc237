"""What a call of `generate` holds of its caches."""

from __future__ import annotations

from offload.config import OffloadConfig
from offload.planning.plan.kv_plan import alike, kv_held
from offload.zero.kv.sizes import CachedLayer


def test_memory_for_what_attention_reads_is_that_of_the_planned_tokens() -> None:
    """Of a prompt that is shorter, too: a third of what was held was predicted."""
    keys = {"placement": {"kv": "host"}, "kv": {"tokens": 1 << 16}}
    config = OffloadConfig.model_validate(keys)
    held = kv_held(config, alike(2, CachedLayer(2, 16, 16)), 1, 14, itemsize=4, gpu=False)
    assert held is not None
    open_pages, read = 2 * (2 << 20), (1 << 16) * 2 * (16 + 16) * 4
    assert held.computing == open_pages + read
