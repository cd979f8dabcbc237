"""transformers' packed experts, computed expert by expert: an entry of its registry of expert
implementations, in the place of its default, `grouped_mm`, and with the same bits.

The default sorts the pairs of a token and an expert by expert, and multiplies all experts' matrices
[E, out, in] with their pairs' rows in one call. Here each expert is one such call, with its own
matrices, which are leaves of the graph: those of an expert without tokens are never asked for, and
gradients are those of the experts that had some.

    hidden states [T, D] ──sort by expert──► [S, D]   S = T·K pairs
                                               │ split
              expert e: up ► gate ► down   using(e) ... one after another; backward in reverse order
                                               │ cat
    sum over K of the weighted rows [T, D] ◄─unsort── [S, D]

The bits are those of the default: a product depends on its own rows alone, and what the default
computes for all pairs at once is computed so here. Only the activation is not, and its bits on a
CPU depend on where a row lies among the others (`_in_place`). Not the same, to rounding: fp32
activations with exp where PyTorch's threads part all pairs' elements, or an expert's, at no
multiple of 64 (there the default's own bits depend on the number of threads); gradients that the
default sums up in any order (`_rows`); matrices of a single expert beside pairs of no expert.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _grouped_linear,
    grouped_mm_experts_forward,
)

from offload.tiers.errors import UnsupportedError
from offload.zero.hooks.compilers import uncompiled

NAME = "offload"  # in transformers' registry
DEFAULT = "grouped_mm"  # what it has the bits of
_ATTRIBUTE = "_offload_expert_weights"
# PyTorch's vectorized loops take two vectors at a time, of 64 bytes at most: 64 elements of 16 bits
_LOOP_NUMEL = 64


class ExpertWeights(Protocol):
    """The matrices and biases of one module's experts."""

    def announce(self, experts: Sequence[int]) -> None:
        """Announce the experts that will be used now, in this order, and no others. Called once per
        forward, also with none."""
        ...

    def using(self, expert: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Provide the slices of one expert by the names of the module's parameters
        (`weight_names`), each without the first dimension: leaves that get the gradients. They are
        there inside; those that backward needs must be there again by then."""
        ...


def weight_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters [E, ...] of a module of experts."""
    settings: Any = module
    matrices = _matrices(settings)
    return [*matrices, *(f"{name}_bias" for name in matrices if settings.has_bias)]


def attach(module: nn.Module, weights: ExpertWeights) -> None:
    """Let a module of experts, set to transformers' default, compute with these weights until
    `detach`. Its configuration then names this implementation, also for the other modules that
    share it: those compute as by default."""
    vars(module)[_ATTRIBUTE] = _Attached(module, weights)
    config: Any = module.config
    chosen = config._experts_implementation
    if not isinstance(chosen, _Chosen):
        chosen = _Chosen(NAME)
        _choose(module, chosen)
    chosen.modules += 1


def detach(module: nn.Module) -> None:
    """Undo `attach`. A choice that was made in between stays, and this implementation stays chosen
    while modules with the same configuration have it attached."""
    del vars(module)[_ATTRIBUTE]
    config: Any = module.config
    chosen = config._experts_implementation
    if isinstance(chosen, _Chosen):
        chosen.modules -= 1
    if chosen == NAME and getattr(chosen, "modules", 0) <= 0:
        _choose(module, DEFAULT)


def _choose(module: nn.Module, implementation: str) -> None:
    config: Any = module.config
    is_theirs = isinstance(config, PreTrainedConfig)  # and not for the configurations within it
    config._experts_implementation = {"": implementation} if is_theirs else implementation


class _Chosen(str):
    """The name of this implementation in a configuration. Its copies have the default's."""

    modules = 0  # that have weights attached, maybe of several models

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (DEFAULT,)


class _Attached:
    """Weights as a module's attribute."""

    def __init__(self, module: nn.Module, weights: ExpertWeights) -> None:
        self.weights = weights
        self._params = {name: getattr(module, name) for name in weight_names(module)}

    def stand_for(self, module: nn.Module) -> bool:
        """Return whether the module would compute with the parameters that these are slices of, not
        with a parametrization (PEFT's adapters) or others (`torch.func.functional_call`)."""
        own = module._parameters
        return all(own.get(name) is param for name, param in self._params.items())


@uncompiled
def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,  # [T, D]
    top_k_index: Tensor,  # [T, K]; num_experts and above: no expert of this rank
    top_k_weights: Tensor,  # [T, K]
) -> Tensor:  # [T, D]
    """Compute what transformers' `grouped_mm_experts_forward` does, to the bit.

    A module with nothing attached, or with other parameters than those attached to, computes as by
    default. Raises UnsupportedError for a negative expert, where the default mixes up rows.
    """
    attached: _Attached | None = vars(self).get(_ATTRIBUTE)
    if attached is None or not attached.stand_for(self):
        plain: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return plain
    settings: Any = self
    T, K = top_k_index.shape
    ids, order = torch.sort(top_k_index.reshape(-1))
    rows = _rows(hidden_states, order // K)  # [S, D]
    experts, counts = torch.unique_consecutive(ids, return_counts=True)
    used = [expert for expert in experts.tolist() if expert < settings.num_experts]
    if used and used[0] < 0:
        raise UnsupportedError(
            f"tokens are routed to expert {used[0]}: experts have numbers from 0, and those from "
            "num_experts on are of other ranks; give what goes to no expert the number num_experts"
        )
    # the default gives zeros as gradients where no expert has tokens: let one of them have those
    none = [] if used or not torch.is_grad_enabled() else [0]
    attached.weights.announce([*used, *none])
    sizes = counts.tolist()
    *parts, rest = rows.split([*sizes[: len(used)], sum(sizes[len(used) :])])  # of no expert here
    done = 0  # pairs
    outputs = []
    for expert, part, count in zip(used, parts, counts.to(torch.int32), strict=False):
        with attached.weights.using(expert) as weights:
            outputs.append(_expert(settings, weights, part, count.view(1), done, T * K))
        done += len(part)
    for expert in none:
        with attached.weights.using(expert) as weights:
            outputs.append(
                _expert(settings, weights, rows[:0], counts.new_zeros(1, dtype=torch.int32), 0, 0)
            )
    if len(rest) or not used:
        # of no expert: zeros, through which the hidden states get the gradient zero
        outputs.append(rest.masked_fill(torch.ones_like(rest, dtype=torch.bool), 0.0))
    joined = torch.cat([part.to(outputs[0].dtype) for part in outputs])
    weighted = joined * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    summed = weighted[back].view(T, K, hidden_states.size(-1)).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _expert(
    settings: Any, weights: Mapping[str, Tensor], rows: Tensor, count: Tensor, start: int,
    number: int,
) -> Tensor:  # fmt: skip
    """Compute one expert's rows, of which the first is number `start` of all the `number` pairs."""
    up, down = _matrices(settings)
    activation = settings._apply_gate if settings.has_gate else settings.act_fn
    hidden = _linear(settings, rows, count, weights, up)
    hidden = _in_place(activation, hidden, start, number, 2 if settings.has_gate else 1)
    return _linear(settings, hidden, count, weights, down)


def _matrices(settings: Any) -> tuple[str, str]:
    return "gate_up_proj" if settings.has_gate else "up_proj", "down_proj"


def _linear(
    settings: Any, rows: Tensor, count: Tensor, weights: Mapping[str, Tensor], name: str
) -> Tensor:
    """Multiply `rows` by one matrix and add its bias. `count` is their number, on their device."""
    bias = None
    if settings.has_bias:
        # a row for each, as by default: so the gradients of the rows are added one after another
        first = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        bias = _rows(weights[f"{name}_bias"].unsqueeze(0), first)
    weight = weights[name].unsqueeze(0)
    product: Tensor = _grouped_linear(rows, weight, count, bias, settings.is_transposed)
    return product


def _rows(table: Tensor, numbers: Tensor) -> Tensor:
    """`table[numbers]`, whose gradient is a sum in the order of `numbers`.

    Indexing adds fp32 gradients in any order if a CPU has several threads. With one it has this
    order, as always on a GPU and for other types; there `index_select` has another.
    """
    if table.dtype is torch.float32 and table.device.type == "cpu":
        return table.index_select(0, numbers)
    return table[numbers]


def _in_place(activation: Any, hidden: Tensor, start: int, number: int, halves: int) -> Tensor:
    """`activation` of an expert's rows as if they were where they are among all pairs' rows.

    PyTorch's loops on a CPU take whole vectors, and what is left over element by element, for which
    exp has other bits; and a half of one row alone is contiguous, for which GELU has other code.
    Rows of zeros before and behind put every row into the place that it has by default. Where a row
    is a multiple of two vectors, none are needed but for an expert with one pair.
    """
    period = _LOOP_NUMEL // math.gcd(hidden.size(1) // halves, _LOOP_NUMEL)  # in rows
    before, end = start % period, start + len(hidden)
    behind = min(-end % period, number - end)
    if before + len(hidden) + behind == 1 < number:
        before = period
    if before or behind:
        padded = nn.functional.pad(hidden, (0, 0, before, behind))
        activated: Tensor = activation(padded)[before : before + len(hidden)]
    else:
        activated = activation(hidden)
    return activated


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
