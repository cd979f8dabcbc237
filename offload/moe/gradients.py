"""Averages and clips gradients of several ranks, in a loop without an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload.moe.exchange import ExpertGroups, Group, expert_groups
from offload.moe.gate import Gate
from offload.moe.layer import MoE
from offload.tiers.errors import StateError
from offload.zero.tensors.paged import PagedTensor


def average_gradients(model: nn.Module) -> None:
    """Set every gradient to that of the mean loss over all ranks. Call it once per step, on every
    rank, after the last backward. Raise StateError if an engine trains the model: it does this
    itself.

    Experts that are spread over ranks are summed over those that have the same ones, and divided by
    the number of all ranks: their gradients have come from the losses of all. A gradient that no
    rank has stays None. Balancing gates learn what tokens of all ranks chose.
    """
    if not dist.is_initialized():
        raise StateError("average_gradients: there is no process group to average over")
    world = dist.group.WORLD
    assert world is not None, "initialised"
    spread = {param: groups.data for param, groups in _spread(model)}
    by_group: dict[Group, list[nn.Parameter]] = defaultdict(list)
    for param in model.parameters():
        if param.requires_grad:
            by_group[spread.get(param, world)].append(param)
    for group, params in by_group.items():
        _sum(_gradients(params, group), group, divisor=world.size())
    for gate in (m for m in model.modules() if isinstance(m, Gate) and m.balances):
        total = gate.own_load
        dist.all_reduce(total)
        gate.share_load(total)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over the whole model, including the experts of all
    ranks, is at most `max_norm`. Return the norm before, the same on every rank.
    (`torch.nn.utils.clip_grad_norm_` would compute another norm on each rank.)"""
    spread = dict(_spread(model))
    own = [p for p in model.parameters() if p not in spread]
    square = _square(own)
    by_group: dict[Group, list[nn.Parameter]] = defaultdict(list)
    for param, groups in spread.items():
        by_group[groups.expert].append(param)
    for group, params in by_group.items():
        experts = _square(params)
        dist.all_reduce(experts, group=group)
        square = square + experts.to(square.device)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_([*own, *spread], max_norm, norm)
    return norm


def _square(params: Sequence[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in params if p.grad is not None]
    squares = [gradient.float().square().sum() for gradient in gradients]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=params[0].device)


def _spread(model: nn.Module) -> Iterator[tuple[nn.Parameter, ExpertGroups]]:
    """Yield the parameters of experts that are spread over ranks, and the ranks' groups."""
    for module in model.modules():
        if isinstance(module, MoE) and module.ep_size > 1:
            groups = expert_groups(module.ep_size)
            yield from ((param, groups) for param in module.experts.parameters())


def _gradients(params: Sequence[nn.Parameter], group: Group) -> list[Tensor]:
    """Return the gradients that any rank of the group has; a rank without one contributes zeros."""
    kinds = [0 if p.grad is None else 2 if isinstance(p.grad, PagedTensor) else 1 for p in params]
    there = torch.tensor(kinds, dtype=torch.int32).to(params[0].device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    if 2 in there:
        raise StateError(
            "average_gradients: an engine trains this model, and averages its gradients over ranks "
            "in its step; leave the call out"
        )
    for param, somewhere in zip(params, there.tolist(), strict=True):
        if somewhere and param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in params if param.grad is not None]


def _sum(gradients: Sequence[Tensor], group: Group, divisor: int) -> None:
    by_format: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_format[gradient.dtype, gradient.device].append(gradient)
    for same in by_format.values():
        flat = torch.cat([gradient.flatten() for gradient in same])
        dist.all_reduce(flat, group=group)
        flat /= divisor
        for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(part.view_as(gradient))
