"""`deepspeed.moe.utils`: which parameters belong to experts, and param groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from offload import moe


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether the parameter belongs to an expert."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return whether there are layers of experts, and the experts of the last one (0: none)."""
    numbers = [each.num_experts for each in module.modules() if isinstance(each, moe.MoE)]
    return bool(numbers), numbers[-1] if numbers else 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the same param groups without experts, then groups of experts with the same options,
    one for each `ep_size`, marked with `moe: True`. The order of parameters is kept."""
    given = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    dense, experts = [], []
    for group in given:
        params = [*group["params"]]
        dense.append({**group, "params": [p for p in params if not is_moe_param(p)]})
        names = dict.fromkeys(p.group_name for p in params if is_moe_param(p))
        experts += [
            {**group, "name": name, "moe": True,
             "params": [p for p in params if is_moe_param(p) and p.group_name == name]}
            for name in names
        ]  # fmt: skip
    return [*dense, *experts]
