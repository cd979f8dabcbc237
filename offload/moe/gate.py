"""The router of a layer of experts: a linear layer in fp32, and a rule for the choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from offload.moe.gating import Routing, top_1, top_2, top_k
from offload.tiers.errors import ConfigError

_POLICIES = (None, "Jitter", "RSample")


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
        for holds, message in self._rules():
            if not holds:
                raise ConfigError(f"MoE: {message}")

    def _rules(self) -> list[tuple[bool, str]]:
        E, k, policy = self.num_experts, self.k, self.noisy_gate_policy
        counts: dict[str, Any] = {"num_experts": E, "k": k, "min_capacity": self.min_capacity}
        for name, count in counts.items():  # what follows compares them
            if isinstance(count, bool) or not isinstance(count, int):
                return [(False, f"{name} is {count!r}; a whole number")]
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
        return rules


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
    least = torch.finfo(like.dtype).tiny
    return -torch.log(-torch.log(torch.rand_like(like).clamp(min=least)))
