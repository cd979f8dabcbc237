"""The router of a layer of experts: a linear layer in fp32, and a rule for the choice.

    top_1    Switch (Fedus et al., 2021), random token selection (Kim et al., 2021)
    top_2    GShard (Lepikhin et al., 2020): the second choice by the Gumbel-max trick
    top_k    any number

T tokens, E experts, K choices. Capacities, losses and weights are DeepSpeed's to the bit: the order
of each operation matters. Random numbers are arguments of the rules. `used` (T bool) leaves tokens
out: they go nowhere. NaN and infinite logits give NaN weights and losses, and choices within
0..E-1.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from offload.tiers.errors import ConfigError

_POLICIES = (None, "Jitter", "RSample")


@dataclass(frozen=True)
class Routing:
    """A gate's decisions about T tokens."""

    experts: Tensor  # TK int64, the number of the expert
    weights: Tensor  # TK fp32, differentiable; 0 where the route was dropped
    kept: Tensor  # TK bool
    l_aux: Tensor  # fp32 scalar, differentiable
    shares: Tensor  # TE fp32, differentiable: the loss's probabilities
    exp_counts: Tensor  # E int64, routes to each expert before any was dropped


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The options of a gate's rule, which `MoE` describes. Raises ConfigError for invalid ones."""

    num_experts: int
    k: int
    capacity_factor: float
    eval_capacity_factor: float
    min_capacity: int
    noisy_gate_policy: str | None
    drop_tokens: bool
    use_rts: bool
    top2_2nd_expert_sampling: bool

    def __post_init__(self) -> None:
        E, k, policy = self.num_experts, self.k, self.noisy_gate_policy
        rules = [
            (E >= 1, f"num_experts is {E}; one is the least"),
            (1 <= k <= E, f"k is {k}, and a token can choose 1 to {E} of {E} experts"),
            (self.min_capacity >= 0, f"min_capacity is {self.min_capacity}; 0 is the least"),
            (policy in _POLICIES, f"noisy_gate_policy is {policy!r}; None, 'Jitter' or 'RSample'"),
            (policy != "RSample" or k == 1,
             "noisy_gate_policy 'RSample' is for k=1; 'Jitter' is for every k"),
        ]  # fmt: skip
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            allowed = f"{name} is {factor!r}; a finite number above 0 (drop_tokens=False: no limit)"
            rules.append((isinstance(factor, (int, float)) and 0 < factor < math.inf, allowed))
        for holds, message in rules:
            if not holds:
                raise ConfigError(f"MoE: {message}")


class Gate(nn.Module):
    """Chooses experts for each token. `weight` is E x H.

    Logits are fp32, whatever the format of the parameters, also under autocast. Random numbers are
    drawn in training alone, from torch's generator of the input's device, as dropout draws them.
    """

    def __init__(self, hidden_size: int, options: GateOptions) -> None:
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.empty(options.num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weight like `nn.Linear`."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor, used: Tensor | None = None) -> Routing:
        """Choose experts. `x` is TH, `used` T bool: tokens that are not used go to no expert."""
        with torch.autocast(x.device.type, enabled=False):
            inputs = x.float()
            if self.training and self.options.noisy_gate_policy == "Jitter":
                inputs = inputs * _jitter(inputs)
            return self._route(F.linear(inputs, self.weight.float()), used)

    def _route(self, logits: Tensor, used: Tensor | None) -> Routing:
        options, draws = self.options, self.training
        factor = options.capacity_factor if draws else options.eval_capacity_factor
        limits = (factor, options.min_capacity)
        common: dict[str, Any] = {"drop": options.drop_tokens, "used": used}
        if options.k > 2:
            return top_k(logits, options.k, *limits, **common)
        if options.k == 2:
            sampled = draws and options.top2_2nd_expert_sampling
            return top_2(logits, *limits, gumbel=_gumbel(logits) if sampled else None, **common)
        sampled = draws and options.noisy_gate_policy == "RSample"
        by_chance = draws and options.use_rts and options.drop_tokens
        return top_1(
            logits, *limits, gumbel=_gumbel(logits) if sampled else None,
            uniform=torch.rand_like(logits[:, 0]) if by_chance else None, **common,
        )  # fmt: skip


def _jitter(like: Tensor, epsilon: float = 1e-2) -> Tensor:
    """Return uniform numbers in 1 ± epsilon."""
    return torch.rand_like(like) * (2 * epsilon) + (1 - epsilon)


def _gumbel(like: Tensor) -> Tensor:
    """Return numbers from the standard Gumbel distribution: the largest of logits with these added
    is a sample of their softmax."""
    tiny = torch.finfo(like.dtype).tiny
    return -torch.log(-torch.log(torch.rand_like(like).clamp(min=tiny)))


# ---------------------------------------------------------------- rules
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
