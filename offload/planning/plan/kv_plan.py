"""What KV caches need of the tiers: a place for pages, and memory to compute with.

at home       full pages, in the tiers of `placement.kv`
computing     each layer's open page, and one layer's keys and values as attention reads them
host          two pages on their way to or from nvme
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.tiers.units import round_up
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

KV_PAGE_NBYTES = 4 << 20  # about: requests for files of this size keep disks busy
_OPEN_SHARE = 8  # open pages are at most this part of a layer's keys and values, where it is known


@dataclass(frozen=True)
class KVPlan:
    """Room that a plan leaves to the KV caches of a model. They may take more, where there is."""

    placement: Placement  # of full pages
    tokens: int  # of all sequences together
    layers: int
    page_nbytes: int | None  # of a page, about; None: as there is room
    computing: Tier
    expected: Mapping[Tier, int]  # bytes


def plan_kv(config: OffloadConfig, model: ModelShape, *, itemsize: int, gpu: bool) -> KVPlan | None:
    """None where nothing says that KV caches live in tiers, and in training."""
    placement = config.placement.kv
    if placement is None or not model.cached:
        return None
    tokens, int8 = config.kv.tokens or 1, config.kv.dtype == "int8"
    stored = [layer.token_nbytes(itemsize, int8=int8) for layer in model.cached]
    computed = [layer.token_nbytes(itemsize) for layer in model.cached]
    page = max(_page_nbytes(token_nbytes, tokens) for token_nbytes in stored)
    computing = Tier.DEVICE if gpu else Tier.HOST
    expected: dict[Tier, int] = defaultdict(int)
    expected[computing] += page * len(stored) + _whole(tokens * max(computed))
    if Tier.NVME in placement.tiers:
        expected[Tier.HOST] += 2 * page
    for tier, share in placement.shares:
        expected[tier] += sum(_whole(int(tokens * each * share)) + page for each in stored)
    known = page if config.kv.tokens else None
    return KVPlan(placement, tokens, len(stored), known, computing, expected)


def _page_nbytes(token_nbytes: int, tokens: int) -> int:
    most = max(token_nbytes, token_nbytes * tokens // _OPEN_SHARE)
    return _whole(max(token_nbytes, min(KV_PAGE_NBYTES, most)))


def _whole(nbytes: int) -> int:
    return round_up(nbytes, PAGE_NBYTES)
