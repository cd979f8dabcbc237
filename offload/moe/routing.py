"""The experts of each token, and the way there and back by indices.

    x       TH  ──gather──▶  NH, sorted by expert  ──experts──▶  NH  ──combine──▶  TH

T tokens, H hidden, K choices of a token, E experts, C places of an expert, N routes that are kept.
No [T, E, C] array is part of a computation (MegaBlocks, Gale et al., 2022, does without, too); the
two here that are such arrays are for comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """A gate's decisions about T tokens."""

    experts: Tensor  # TK int64, the number of the expert
    weights: Tensor  # TK fp32, differentiable; 0 where the route was dropped
    kept: Tensor  # TK bool
    slots: Tensor  # TK int64, the place in the expert's buffer, where kept
    capacity: int | None  # places of an expert; None: as many as it needs
    l_aux: Tensor  # fp32 scalar, differentiable
    shares: Tensor  # TE fp32, differentiable: the loss's probabilities
    exp_counts: Tensor  # E int64, routes to each expert before any was dropped

    def combine_weights(self) -> Tensor:
        """The weight of each token in each place, as GShard writes it (TEC fp32)."""
        T, E = self.experts.shape[0], self.exp_counts.shape[0]
        C = int(self.exp_counts.max()) if self.capacity is None else self.capacity
        t, k = self.kept.nonzero(as_tuple=True)
        dense = self.weights.new_zeros(T, E, C)
        return dense.index_put((t, self.experts[t, k], self.slots[t, k]), self.weights[t, k])

    def dispatch_mask(self) -> Tensor:
        """Which token is in which place (TEC bool)."""
        return self.combine_weights().bool()


class Dispatch:
    """The kept routes, sorted by expert, and within one by token.

    Waits for the device once: the numbers of tokens are needed to call the experts."""

    def __init__(self, routing: Routing) -> None:
        E = routing.exp_counts.shape[0]
        self._routing = routing
        experts = torch.where(routing.kept, routing.experts, E).flatten()
        order = experts.argsort(stable=True)
        self.counts: list[int] = torch.bincount(experts, minlength=E)[:E].tolist()
        total = sum(self.counts)
        self._order = order[:total]
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        self._places = places.clamp(max=total)  # a dropped route's is behind the last one

    def gather(self, x: Tensor) -> Tensor:
        """Gather TH to NH."""
        # Every row of what is indexed is read once: its gradient is written, not summed, and the
        # sum over K has one order. Indexing `x` would add gradients in any order.
        repeated = x.unsqueeze(1).expand(-1, self._routing.experts.shape[1], -1)
        return repeated.reshape(-1, x.shape[1]).index_select(0, self._order)

    def combine(self, y: Tensor) -> Tensor:
        """Sum NH to TH in fp32 or wider: each token over its experts, zeros if it has none."""
        T, K = self._routing.experts.shape
        padded = y if len(y) == T * K else torch.cat([y, y.new_zeros(1, y.shape[1])])
        routed = padded.index_select(0, self._places).view(T, K, y.shape[1])
        return (routed * self._routing.weights.unsqueeze(-1)).sum(1)


def chosen(counts: Sequence[int], first: int = 0) -> list[int]:
    """Return the numbers of the experts with tokens; `counts` begins at expert `first`."""
    return [number for number, count in enumerate(counts, first) if count]
