"""The number of experts that a step touches.

If a router chooses `k` of `E` experts for each of `T` tokens with equal probability, an expert gets
no token with a probability of (1 - k / E)^T, so that E (1 - (1 - k / E)^T) experts are expected to
be touched. Routers that prefer some experts touch fewer (the sum is concave in the experts'
shares). Only touched experts are fetched, get gradients and are updated.

If experts are spread over `ep_size` ranks, a `ModelShape` has those of one rank, to which the
tokens of all of these ranks are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload.zero.groups.model_shape import ModelShape


def touched(experts: int, chosen: int | None, tokens: int) -> float:
    """The expected number of `experts` that `tokens` touch; all of them if the number `chosen` for
    a token is not known."""
    if chosen is None or chosen >= experts:
        return float(experts)
    return experts * -math.expm1(tokens * math.log1p(-chosen / experts))


@dataclass(frozen=True, slots=True)
class Table:
    """A module of experts."""

    indices: tuple[int, ...]  # the groups of those on this rank
    ep_size: int  # over how many ranks they are spread

    @property
    def experts(self) -> int:
        """The number of experts on all ranks that share them."""
        return len(self.indices) * self.ep_size

    def touched(self, chosen: int | None, tokens: int) -> int:
        """The touched experts of this rank, rounded up. `tokens`: of all ranks that share."""
        here = touched(self.experts, chosen, tokens) / self.ep_size
        return min(len(self.indices), math.ceil(here - 1e-9))


def tables_of(model: ModelShape) -> list[Table]:
    return [Table(t, model.groups[t[0]].ep_size) for t in model.tables.values()]


def active_numel(model: ModelShape) -> int:
    """The parameters that compute one token: of the experts, on all ranks, only the chosen ones."""
    chosen = model.experts_per_token
    idle = 0
    for table in tables_of(model):
        if chosen is not None and chosen < table.experts:
            idle += _numel(model, table) * (table.experts - chosen) // table.experts
    return model.numel_of_all_ranks - idle


def _numel(model: ModelShape, table: Table) -> int:
    """The parameters of a table on all ranks."""
    return table.ep_size * sum(model.groups[index].numel for index in table.indices)
