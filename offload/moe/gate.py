"""The router of a layer of experts: a linear layer in fp32, and a rule for the choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from offload.moe.gating import top_1, top_2, top_k, z_loss
from offload.moe.noise import Noise, fingerprint
from offload.moe.routing import Routing
from offload.tiers.errors import ConfigError
from offload.zero.hooks.session import in_backward

_POLICIES = (None, "Jitter", "RSample")
_SCORES = ("softmax", "sigmoid")
_DROPS = ("probs", "position")
_IN_FLIGHT = 1 << 12  # forwards whose backward is to come


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
    drop_policy: str | None
    scores: str
    groups: tuple[int, int] | None
    bias_update_rate: float
    z_loss_weight: float

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
            (policy != "RSample" or (k == 1 and self.is_classic),
             "noisy_gate_policy 'RSample' is for k=1 with softmax scores, without bias and groups; "
             "'Jitter' is for every k"),
            (self.scores in _SCORES, f"scores is {self.scores!r}; 'softmax' or 'sigmoid'"),
            (self.drop_policy in (None, *_DROPS),
             f"drop_policy is {self.drop_policy!r}; 'probs' or 'position'"),
            (self.drop_policy is None or self.has_drop_policy,
             f"drop_policy is for k >= 3, sigmoid scores, a bias or groups: k={k} drops "
             f"{'at random, or with use_rts=False the last ones' if k == 1 else 'by position'}"),
        ]  # fmt: skip
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            allowed = f"{name} is {factor!r}; a finite number above 0 (drop_tokens=False: no limit)"
            rules.append((isinstance(factor, (int, float)) and 0 < factor < math.inf, allowed))
        for name in ("bias_update_rate", "z_loss_weight"):
            value = getattr(self, name)
            rules.append((0 <= value < math.inf, f"{name} is {value}; 0 (off) or a number above"))
        return [*rules, *self._group_rules()]

    def _group_rules(self) -> list[tuple[bool, str]]:
        if self.groups is None:
            return []
        (number, taken), E = self.groups, self.num_experts
        even = number >= 1 and E % number == 0
        return [
            (even, f"groups is {self.groups}: {E} experts do not make {number} equal groups"),
            (1 <= taken <= number, f"groups is {self.groups}: {taken} of {number} groups"),
            (not even or taken * (E // number) >= self.k,
             f"groups is {self.groups}: {taken} groups have {taken * E // max(number, 1)} experts, "
             f"and a token chooses {self.k}"),
        ]  # fmt: skip

    @property
    def is_classic(self) -> bool:
        """Whether k alone says how experts are chosen, as in DeepSpeed."""
        return self.scores == "softmax" and self.groups is None and not self.bias_update_rate

    @property
    def has_drop_policy(self) -> bool:
        return self.k > 2 or not self.is_classic


class Gate(nn.Module):
    """Chooses experts for each token. `weight` is E x H.

    Logits are fp32, whatever the format of the parameters, also under autocast. Random numbers are
    drawn in training alone, from `generator`, and are the same when a forward is computed again
    (`offload/moe/noise.py`). `seed` and `calls`, by which it is seeded, are buffers: a checkpoint
    has them, and training goes on with the numbers it would have drawn.

    `load` (a buffer, E int64) counts the tokens that each expert was given in forwards of training,
    recomputed ones not. With `bias_update_rate` it counts since the last update of `choice_bias`
    (a buffer, E fp32): after each optimizer step, the bias of an expert with more tokens than the
    mean goes down by the rate, that of one with fewer goes up (Wang et al., 2024; DeepSeek-V3). A
    gate whose weight no step changes, a frozen one, keeps its bias.
    """

    generator: torch.Generator
    seed: Tensor
    calls: Tensor  # that drew random numbers, so far
    load: Tensor
    choice_bias: Tensor
    stepped_from: Tensor  # fingerprint of the weight when the bias was updated last
    shared_load: Tensor  # the part of `load` that is of all ranks already

    def __init__(self, hidden_size: int, options: GateOptions, seed: int | None = None) -> None:
        """Without `seed`, it is drawn from torch's generator."""
        super().__init__()
        self.options = options
        self.generator = torch.Generator()
        self._first_seed = seed
        # numbers of the calls since the weight (its fingerprint) changed, by their fingerprints
        self._weight = 0
        self._numbers: dict[int, int] = {}
        self.weight = nn.Parameter(torch.empty(options.num_experts, hidden_size))
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.register_buffer("load", torch.empty(options.num_experts, dtype=torch.int64))
        if options.bias_update_rate:
            bias = torch.empty(options.num_experts, dtype=torch.float32)
            self.register_buffer("choice_bias", bias)
            self.register_buffer("stepped_from", torch.empty((), dtype=torch.int64))
            shared = torch.empty(options.num_experts, dtype=torch.int64)
            self.register_buffer("shared_load", shared)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weight like `nn.Linear`, the seed unless one was given, and the counts."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self._first_seed is None:
            self.seed.random_()
        else:
            self.seed.fill_(self._first_seed)
        self.calls.zero_()
        self.load.zero_()
        if self.options.bias_update_rate:
            self.choice_bias.zero_()
            self.stepped_from.zero_()
            self.shared_load.zero_()

    @property
    def balances(self) -> bool:
        """Whether a bias balances the experts' loads."""
        return self.options.bias_update_rate > 0

    @property
    def own_load(self) -> Tensor:
        """The tokens that this rank has counted since `share_load`, for a gate that balances."""
        return self.load - self.shared_load

    def share_load(self, total: Tensor) -> None:
        """Count for this rank the choices of all ranks' tokens: `total` is the sum of their
        `own_load`. Otherwise ranks with other loads would choose by other biases."""
        self.shared_load += total.to(self.load.device)
        self.load.copy_(self.shared_load)

    def forward(self, x: Tensor, used: Tensor | None = None) -> Routing:
        """Choose experts. `x` is TH, `used` T bool: tokens that are not used go to no expert."""
        noise = self.noise_for(x) if self._draws() and len(x) else None
        with torch.autocast(x.device.type, enabled=False):
            inputs = x.float()
            if noise and self.options.noisy_gate_policy == "Jitter":
                inputs = inputs * noise.jitter(*x.shape)
            logits = F.linear(inputs, self.weight.float())
            routing = self._route(logits, noise, used)
        if self.training and not in_backward():
            self.load += routing.exp_counts
        return routing

    def noise_for(self, x: Tensor) -> Noise:
        """Return the noise for a call with this input (TH): the same for the same input until the
        weight changes. Waits for the device."""
        if self.generator.device != x.device:
            self.generator = torch.Generator(x.device)
        facts = (fingerprint(x), fingerprint(self.weight), self.seed, self.calls)
        call, weight, seed, calls = torch.stack([each.to(x.device) for each in facts]).tolist()
        if weight != self._weight:
            self._weight, self._numbers = weight, {}
        if call not in self._numbers:
            self._numbers[call] = calls
            self.calls += 1
            if len(self._numbers) > _IN_FLIGHT:  # a frozen weight never changes
                del self._numbers[next(iter(self._numbers))]
        return Noise(self.generator, seed, self._numbers[call])

    def _draws(self) -> bool:
        options = self.options
        random_drops = options.use_rts and options.drop_tokens and options.k == 1
        sampled = options.k == 2 and options.top2_2nd_expert_sampling
        classic = options.is_classic and (random_drops or sampled)
        return self.training and (options.noisy_gate_policy is not None or classic)

    def _route(self, logits: Tensor, noise: Noise | None, used: Tensor | None) -> Routing:
        options = self.options
        factor = options.capacity_factor if self.training else options.eval_capacity_factor
        limits = (factor, options.min_capacity)
        common: dict[str, Any] = {"drop": options.drop_tokens, "used": used}
        if not (options.is_classic and options.k <= 2):
            routing = top_k(
                logits, options.k, *limits, drop_policy=options.drop_policy or "probs",
                normalise=options.k > 1, sigmoid=options.scores == "sigmoid", bias=self._bias(),
                groups=options.groups, **common,
            )  # fmt: skip
        elif options.k == 2:
            sampled = options.top2_2nd_expert_sampling
            gumbel = noise.gumbel(*logits.shape) if noise and sampled else None
            routing = top_2(logits, *limits, gumbel=gumbel, **common)
        else:
            sampled = options.noisy_gate_policy == "RSample"
            gumbel = noise.gumbel(*logits.shape) if noise and sampled else None
            uniform = noise.uniform(len(logits)) if noise and options.use_rts else None
            routing = top_1(logits, *limits, uniform=uniform, gumbel=gumbel, **common)
        if not options.z_loss_weight:
            return routing
        return replace(routing, l_aux=routing.l_aux + options.z_loss_weight * z_loss(logits))

    # ---------------------------------------------------------------- balancing
    def _bias(self) -> Tensor | None:
        """Return the up-to-date bias. An update comes with the first forward of training after a
        step: recomputation comes before it, since backward needs the weight as it was."""
        if not self.options.bias_update_rate:
            return None
        if self.training:
            weight = fingerprint(self.weight)
            stepped = weight != self.stepped_from
            # in whole numbers: of the mean's E-fold
            missing = self.load.sum() - self.load * len(self.load)
            self.choice_bias += self.options.bias_update_rate * torch.sign(missing) * stepped
            self.load *= ~stepped
            self.shared_load *= ~stepped
            self.stepped_from.copy_(weight)
        return self.choice_bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        """Move and convert the gate like a module, but for the bias, which 16 bits would freeze."""
        bias = self._buffers.get("choice_bias")
        super()._apply(fn, recurse)
        if bias is not None and self.choice_bias.dtype != bias.dtype:
            self.choice_bias = bias.to(self.choice_bias.device)
        return self
