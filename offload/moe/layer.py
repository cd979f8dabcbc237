"""A layer whose tokens are computed by the experts that they choose.

    x       TH  ──gather──▶  NH, sorted by expert  ──experts──▶  NH  ──combine──▶  TH

T tokens, H hidden, K choices of a token, E experts, N routes that are kept. There is no array of
tokens, experts and places of an expert (MegaBlocks, Gale et al., 2022, does without, too).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from offload.moe.exchange import Exchange, expert_groups
from offload.moe.experts import Experts
from offload.moe.gate import Gate, GateOptions, Routing
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.recompute.random_state import RandomState, torch_generators

_log = logging.getLogger("offload")

MakeExpert = Callable[[], nn.Module]


class MoE(nn.Module):
    """A mixture of experts, with the arguments and results of DeepSpeed's layer of this name.

    `expert` is a module, of which each expert is a copy with the same values, or a function that
    makes one: each then has values of its own, drawn under a seed made from its number. It is
    called with tokens, [n, H], and returns as many; of a tuple, its first item.

    Arguments:
        hidden_size: H, of the input and output.
        num_experts: E.
        ep_size: over how many ranks they are spread (`offload/moe/exchange.py`). Every rank
            builds the layer; names of experts have their numbers among all.
        k: experts per token. 1: Switch; 2: GShard; any other number: the k best.
        capacity_factor, eval_capacity_factor, min_capacity: in training and otherwise an expert
            takes max(ceil(k x T / E x factor), min_capacity) of T tokens (on each rank); further
            ones are dropped: this layer gives zeros for them.
        use_residual: beside the experts a dense `expert`, and a learned, convex combination
            (Residual MoE, Rajbhandari et al., 2022).
        noisy_gate_policy: in training 'Jitter' multiplies the gate's input with U(0.99, 1.01),
            'RSample' (k=1) draws the expert from the probabilities.
        drop_tokens: False: no capacity, every token reaches its experts.
        use_rts: k=1: which tokens a full expert takes is left to chance, in training.
        top2_2nd_expert_sampling: k=2: draw the second expert from the probabilities, in training.

    Random numbers are drawn in training alone, from torch's generator. Raises ConfigError for
    invalid arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | MakeExpert,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        *,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        options = GateOptions(
            num_experts=num_experts, k=k, capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor, min_capacity=min_capacity,
            noisy_gate_policy=None if noisy_gate_policy == "None" else noisy_gate_policy,
            drop_tokens=drop_tokens, use_rts=use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )  # fmt: skip
        if ep_size < 1 or num_experts % ep_size:
            raise ConfigError(
                f"MoE: ep_size is {ep_size}, and {num_experts} experts do not divide among "
                f"{ep_size} ranks"
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.k = k
        self.ep_size = ep_size
        self.use_residual = use_residual
        self._told = False
        make = _maker(expert)
        self.gate = Gate(hidden_size, options)
        here = num_experts // ep_size
        first = here * expert_groups(ep_size).expert.rank() if ep_size > 1 else 0
        self.experts = Experts(map(make, range(first, first + here)), first, num_experts)
        if use_residual:
            self.mlp = expert if isinstance(expert, nn.Module) else make(num_experts)
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, [..., H] as the input; the auxiliary loss, a scalar in fp32; and the
        number of tokens that chose each expert, dropped ones included (E int64).

        `used_token`, of the input's leading sizes, is 0 for tokens that go to no expert (padding).
        A token with logits that are not finite has a NaN output, and so has the loss.
        """
        output, routing = self.routed(hidden_states, used_token)
        return output, routing.l_aux, routing.exp_counts

    def routed(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Return the output, and the gate's decisions."""
        self._check(hidden_states)
        x = hidden_states.reshape(-1, self.hidden_size)
        used = None if used_token is None else used_token.reshape(-1) != 0
        routing = self.gate(x, used)
        dispatch = Dispatch(routing)
        y = self._compute(dispatch.gather(x), dispatch.counts)
        output = dispatch.combine(y).to(hidden_states.dtype).view_as(hidden_states)
        if self.use_residual:
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, routing

    def _compute(self, x: Tensor, counts: list[int]) -> Tensor:
        """Return the experts' outputs for NH, sorted by expert; experts may be on other ranks."""
        if self.ep_size == 1:
            return self.experts.compute(x, counts)
        self._refuse_ddp()
        self._tell_without_engine()
        exchange = Exchange(counts, expert_groups(self.ep_size).expert, x.device)
        return exchange.back(self.experts.compute(exchange.there(x), exchange.counts))

    def _refuse_ddp(self) -> None:
        """Refuse DDP: it has given every rank the experts of the first one, and would average the
        gradients of different experts, unless it was told to ignore them."""
        ddp = DistributedDataParallel._get_active_ddp_module()
        params = set() if ddp is None else set(ddp._module_parameters)
        if not params.isdisjoint(self.experts.parameters()):
            raise UnsupportedError(
                f"MoE: ep_size is {self.ep_size}, and DistributedDataParallel makes the experts of "
                "all ranks equal; train with offload.initialize, or set ep_size=1"
            )

    def _tell_without_engine(self) -> None:
        """Warn once where no engine trains the layer: a loop may average gradients by itself."""
        if not self._told and torch.is_grad_enabled() and self.experts.on_chosen is None:
            self._told = True
            _log.warning(
                "MoE: ep_size is %d, and no engine trains this model: nothing averages gradients "
                "over ranks; use offload.initialize, or average them before each step, those of "
                "experts over the ranks that have the same ones", self.ep_size,
            )  # fmt: skip

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point() or not x.ndim or x.shape[-1] != self.hidden_size:
            raise ConfigError(
                f"MoE: the input is {tuple(x.shape)} in {x.dtype}; the last size is hidden_size, "
                f"{self.hidden_size}, and the format a floating-point one"
            )

    def extra_repr(self) -> str:
        """Return the text for `print(model)`."""
        return f"num_experts={self.num_experts}, k={self.k}, ep_size={self.ep_size}"


class Dispatch:
    """The kept routes, sorted by expert, and within one by token.

    Waits for the device once: the numbers of tokens are needed to call the experts."""

    def __init__(self, routing: Routing) -> None:
        E = routing.exp_counts.shape[0]
        self._routing = routing
        experts = torch.where(routing.kept, routing.experts, E).flatten()
        order = experts.argsort(stable=True)
        self.counts = _counts(experts, E)
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


def _counts(experts: Tensor, E: int) -> list[int]:  # noqa: N803
    """Count each expert's tokens; `E` stands for no expert. A pass without values has balanced
    routing, of which nothing is dropped."""
    if isinstance(experts, FakeTensor):
        some, more = divmod(experts.numel(), E)
        return [some + 1] * more + [some] * (E - more)
    counts: list[int] = torch.bincount(experts, minlength=E)[:E].tolist()
    return counts


def _maker(expert: nn.Module | MakeExpert) -> Callable[[int], nn.Module]:
    """Return a function that creates the expert with a given number."""
    if isinstance(expert, nn.Module):
        return lambda number: copy.deepcopy(expert)
    base = int(torch.randint(2**62, (), device="cpu"))

    def make(number: int) -> nn.Module:
        # of the CPU and of the device for new tensors
        generators = list(torch_generators(torch.empty(0).device).values())
        with RandomState(generators).again():
            for generator in generators:
                generator.manual_seed(base + number)  # type: ignore[union-attr]
            return expert()

    return make
