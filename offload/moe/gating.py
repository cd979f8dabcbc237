"""The experts that a token goes to, computed from its logits in fp32.

    top_1    Switch (Fedus et al., 2021), random token selection (Kim et al., 2021)
    top_2    GShard (Lepikhin et al., 2020): the second choice by the Gumbel-max trick
    top_k    any number

T tokens, E experts, K choices. Capacities, losses and weights are DeepSpeed's to the bit: the order
of each operation matters. Random numbers are arguments. `used` (T bool) leaves tokens out: they go
nowhere. NaN and infinite logits give NaN weights and losses, and choices within 0..E-1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Routing:
    """A gate's decisions about T tokens."""

    experts: Tensor  # TK int64, the number of the expert
    weights: Tensor  # TK fp32, differentiable; 0 where the route was dropped
    kept: Tensor  # TK bool
    l_aux: Tensor  # fp32 scalar, differentiable
    shares: Tensor  # TE fp32, differentiable: the loss's probabilities
    exp_counts: Tensor  # E int64, routes to each expert before any was dropped


def capacity_of(tokens: int, experts: int, factor: float, min_capacity: int) -> int:
    """Return max(ceil(T / E x factor), min_capacity), rounded in fp32 as DeepSpeed does."""
    places = math.ceil(np.float32(tokens / experts) * np.float32(factor))
    return max(places, min_capacity)


def top_1(
    logits: Tensor, capacity_factor: float, min_capacity: int, *, drop: bool = True,
    uniform: Tensor | None = None, gumbel: Tensor | None = None, used: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Choose the best expert; its weight is its probability.

    An expert with too many tokens keeps those with the largest `uniform` (T), without it those that
    `torch.topk` takes. `gumbel` (TE) is added to the logits for the choice alone.
    """
    T, E = logits.shape
    gates = F.softmax(logits, dim=1)
    experts = torch.argmax(gates if gumbel is None else logits + gumbel, dim=1, keepdim=True)
    mask = _without(F.one_hot(experts[:, 0], E), used)  # TE int64
    counts = mask.sum(0)
    l_aux = torch.sum(_mean(gates) * _mean(mask.float())) * E
    capacity = capacity_of(T, E, capacity_factor, min_capacity) if drop else None
    if capacity is not None:
        priority = mask if uniform is None else mask * uniform.unsqueeze(1)
        best = torch.topk(priority, min(capacity, T), dim=0).indices
        mask = mask * torch.zeros_like(mask).scatter_(0, best, 1)
    kept = mask.bool().gather(1, experts)
    weights = gates.gather(1, experts) * kept
    return Routing(experts, weights, kept, l_aux, gates, counts)


def top_2(
    logits: Tensor, capacity_factor: float, min_capacity: int, *, drop: bool = True,
    gumbel: Tensor | None = None, used: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Choose the two best experts, weights normalised over those kept. Capacity for twice the
    tokens.

    First choices have places before second ones, then tokens by position. `gumbel` (TE) is added to
    the logits for the second choice alone: that expert is drawn from the probabilities.
    """
    T, E = logits.shape
    gates = F.softmax(logits, dim=1)
    first = torch.argmax(gates, dim=1)
    mask1 = F.one_hot(first, E)
    others = logits if gumbel is None else logits + gumbel
    second = torch.argmax(others.masked_fill(mask1.bool(), -math.inf), dim=1)
    mask1, mask2 = _without(mask1, used), _without(F.one_hot(second, E), used)
    places1 = torch.cumsum(mask1, dim=0) - 1
    places2 = torch.cumsum(mask2, dim=0) - 1 + mask1.sum(0, keepdim=True)
    l_aux = balancing_loss(_mean(gates), _mean(mask1.float()), 1)
    counts = torch.sum(mask1 + mask2, dim=0)
    capacity = capacity_of(T, E, capacity_factor * 2, min_capacity) if drop else None
    if capacity is not None:
        mask1 = mask1 * (places1 < capacity)
        mask2 = mask2 * (places2 < capacity)
    experts = torch.stack([first, second], 1)
    kept = torch.stack([_at(mask1, first), _at(mask2, second)], 1).bool()
    weights = gates.gather(1, experts) * kept
    weights = weights / _nonzero(weights[:, :1] + weights[:, 1:])
    return Routing(experts, weights, kept, l_aux, gates, counts)


def top_k(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, *, drop: bool = True,
    used: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Choose the k best experts, weights normalised over those kept. Capacity for k times the
    tokens.

    An expert with too many tokens keeps those with the largest probability.
    """
    T, E = logits.shape
    gates = F.softmax(logits, dim=1)
    experts = gates.detach().topk(k, dim=1).indices
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, experts, True)
    mask = mask if used is None else mask & used.unsqueeze(1)
    counts = mask.sum(0)
    l_aux = balancing_loss(_mean(gates), _mean(mask.float()), k)
    capacity = capacity_of(T, E, capacity_factor * k, min_capacity) if drop else None
    if capacity is not None:
        wanted = torch.zeros_like(gates).scatter(1, experts, gates.gather(1, experts).detach())
        best = torch.topk(wanted, min(capacity, T), dim=0, sorted=False).indices
        mask = mask & torch.zeros_like(mask).scatter_(0, best, True)
    weights = gates * mask
    if k > 1:
        weights = weights / _nonzero(weights.sum(1, keepdim=True))
    kept = mask.gather(1, experts)
    return Routing(experts, weights.gather(1, experts), kept, l_aux, gates, counts)


def balancing_loss(shares: Tensor, chosen: Tensor, k: int) -> Tensor:
    """Return E / k sum(P f): `shares` (P) and `chosen` (f), both E, are the mean probability of
    each expert and the share of tokens that chose it. It is 1 if all are chosen equally often."""
    E = shares.shape[0]
    return torch.mean(shares * chosen) * E * E / k


def _mean(values: Tensor) -> Tensor:
    """Return the mean over tokens; zeros without tokens."""
    return values.mean(0) if len(values) else values.sum(0)


def _nonzero(values: Tensor) -> Tensor:
    """Return a denominator that is not zero, even for a token of which no route is kept."""
    return torch.clamp(values, min=torch.finfo(values.dtype).eps)


def _without(mask: Tensor, used: Tensor | None) -> Tensor:
    return mask if used is None else mask * used.unsqueeze(1)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(1, columns.unsqueeze(1))[:, 0]
