"""The room that KV caches need in the tiers: for pages, and for computing with them.

at home       full pages, in the tiers of `placement.kv`
computing     each layer's open page, and one layer's keys and values as attention reads them
host          two pages on their way to or from nvme
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.plan.sizes import pages
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

KV_PAGE_NBYTES = 4 << 20  # about: requests for files of this size keep disks busy
_OPEN_SHARE = 8  # open pages are at most this part of a layer's keys and values, where it is known


@dataclass(frozen=True)
class KVPlan:
    """The room that a plan leaves to a model's KV caches. They may take more if there is more."""

    placement: Placement  # of full pages
    tokens: int  # of all sequences together
    layers: int
    token_nbytes: int  # of a token in all layers, as it is stored
    page_nbytes: int | None  # of a page, about; None: as there is room, for tokens are not planned
    computing: Tier
    expected: Mapping[Tier, int]  # bytes


def plan_kv(config: OffloadConfig, model: ModelShape, *, itemsize: int, gpu: bool) -> KVPlan | None:
    """Plan the KV caches; None in training, or if the configuration puts them in no tier."""
    placement = config.placement.kv
    if placement is None or not model.cached:
        return None
    tokens, int8 = config.kv.tokens or 1, config.kv.dtype == "int8"
    stored = [layer.token_nbytes(itemsize, int8=int8) for layer in model.cached]
    largest = max(stored)
    max_page = max(largest, largest * tokens // _OPEN_SHARE)
    page = pages(max(largest, min(KV_PAGE_NBYTES, max_page)))
    computed = [layer.token_nbytes(itemsize) for layer in model.cached]
    computing = Tier.DEVICE if gpu else Tier.HOST
    expected: dict[Tier, int] = defaultdict(int)
    expected[computing] += page * len(stored) + pages(tokens * max(computed))
    if Tier.NVME in placement.tiers:
        expected[Tier.HOST] += 2 * page
    for tier, share in placement.shares:
        expected[tier] += sum(pages(int(tokens * each * share)) + page for each in stored)
    known = page if config.kv.tokens else None
    return KVPlan(placement, tokens, len(stored), sum(stored), known, computing, expected)
