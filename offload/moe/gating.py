"""The experts that a token goes to, computed from its logits in fp32.

    top_1    Switch (Fedus et al., 2021), random token selection (Kim et al., 2021)
    top_2    GShard (Lepikhin et al., 2020): the second choice by the Gumbel-max trick
    top_k    any number; groups of experts (DeepSeek-V2), sigmoid scores and a bias for the choice
             alone (DeepSeek-V3)

T tokens, E experts, K choices. Capacities, losses and weights are DeepSpeed's to the bit: the order
of each operation matters. Random numbers are arguments. `used` (T bool) leaves tokens out: they go
nowhere. NaN and infinite logits give NaN weights and losses, and choices within 0..E-1.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from offload.moe.routing import Routing


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
    slots = torch.cumsum(mask, dim=0) - 1
    kept = mask.bool().gather(1, experts)
    weights = gates.gather(1, experts) * kept
    return Routing(experts, weights, kept, slots.gather(1, experts), capacity, l_aux, gates, counts)


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
    slots = torch.stack([_at(places1, first), _at(places2, second)], 1)
    weights = gates.gather(1, experts) * kept
    weights = weights / _nonzero(weights[:, :1] + weights[:, 1:])
    return Routing(experts, weights, kept, slots, capacity, l_aux, gates, counts)


def top_k(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, *, drop: bool = True,
    drop_policy: str = "probs", normalise: bool = True, used: Tensor | None = None,
    sigmoid: bool = False, bias: Tensor | None = None, groups: tuple[int, int] | None = None,
) -> Routing:  # fmt: skip
    """Choose the k best experts, weights normalised over those kept. Capacity for k times the
    tokens.

    An expert with too many tokens keeps those with the largest score (`drop_policy` "probs") or the
    first ones ("position"). `sigmoid` scores each expert alone, in the place of a softmax over all.
    `bias` (E fp32) is added to scores for the choice of experts alone. `groups` (G, g): experts lie
    in G groups of equal size, and a token chooses among those of g groups: by a group's best score,
    or with `sigmoid` by the sum of its two best.
    """
    T, E = logits.shape
    scores = torch.sigmoid(logits) if sigmoid else F.softmax(logits, dim=1)
    experts = _best(scores.detach(), k, sigmoid, bias, groups)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    mask = mask if used is None else mask & used.unsqueeze(1)
    counts = mask.sum(0)
    shares = scores / _nonzero(scores.sum(1, keepdim=True)) if sigmoid else scores
    l_aux = balancing_loss(_mean(shares), _mean(mask.float()), k)
    capacity = capacity_of(T, E, capacity_factor * k, min_capacity) if drop else None
    slots = torch.cumsum(mask, dim=0) - 1
    if capacity is not None and drop_policy == "position":
        mask = mask & (slots < capacity)
    elif capacity is not None:
        wanted = torch.zeros_like(scores).scatter(1, experts, scores.gather(1, experts).detach())
        best = torch.topk(wanted, min(capacity, T), dim=0, sorted=False).indices
        mask = mask & torch.zeros_like(mask).scatter_(0, best, True)
        slots = torch.cumsum(mask, dim=0) - 1
    weights = scores * mask
    if normalise:
        weights = weights / _nonzero(weights.sum(1, keepdim=True))
    return Routing(
        experts, weights.gather(1, experts), mask.gather(1, experts), slots.gather(1, experts),
        capacity, l_aux, shares, counts,
    )  # fmt: skip


def balancing_loss(shares: Tensor, chosen: Tensor, k: int) -> Tensor:
    """Return E / k sum(P f): `shares` (P) and `chosen` (f), both E, are the mean probability of
    each expert and the share of tokens that chose it. It is 1 if all are chosen equally often."""
    E = shares.shape[0]
    return torch.mean(shares * chosen) * E * E / k


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean square of the log-sum-exp of each token's logits, a loss that keeps them
    small (ST-MoE, Zoph et al., 2022)."""
    return _mean(torch.logsumexp(logits, dim=1).square())


def _best(
    scores: Tensor, k: int, sigmoid: bool, bias: Tensor | None, groups: tuple[int, int] | None
) -> Tensor:
    """Return the numbers of the chosen experts (TK), the best first."""
    scores = scores if bias is None else scores + bias
    if groups is not None:
        number, taken = groups
        grouped = scores.unflatten(1, (number, -1))  # T, G, E / G
        best = grouped.topk(min(2 if sigmoid else 1, grouped.shape[2]), dim=2).values.sum(2)
        open_groups = torch.zeros_like(best, dtype=torch.bool)
        open_groups.scatter_(1, best.topk(taken, dim=1).indices, True)
        scores = grouped.masked_fill(~open_groups.unsqueeze(2), -math.inf).flatten(1)
    return scores.topk(k, dim=1).indices


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
