"""Packed parameters: one tensor with a row per expert, whose rows are in groups of their own.

the model has    experts.gate_up_proj [E, 2I, D]     a placeholder, of a class that answers for
                                                     the rows (zero/released.py)
groups have      experts.gate_up_proj[0] [2I, D]     leaves of autograd: values, gradients and
                 experts.gate_up_proj[1] ...         optimizer states, each in its tier
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.zero.group import ParamGroup
from offload.zero.layout import ParamSpec


@dataclass(eq=False)
class PackedParam:
    """One parameter of a model, and its rows along the first dimension."""

    param: nn.Parameter
    names: tuple[str, ...]  # in the model
    rows: list[nn.Parameter] = field(default_factory=list)
    places: list[tuple[ParamGroup, int]] = field(default_factory=list)  # of the rows

    @classmethod
    def of(cls, param: nn.Parameter, names: tuple[str, ...]) -> PackedParam:
        """The rows begin as views of the parameter's values."""
        whole = param.detach()
        rows = [nn.Parameter(row, requires_grad=param.requires_grad) for row in whole]
        return cls(param, names, rows)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def spec(self) -> ParamSpec:
        """As if it lay in a buffer of its own."""
        trainable = self.places[0][0].layout.params[self.places[0][1]].trainable
        return ParamSpec(self.names, tuple(self.param.shape), 0, trainable)

    @property
    def version(self) -> int:
        """Changes with every update or write of a row."""
        return sum(group.version for group, _ in self.places)

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for group, _ in self.places]


@dataclass(eq=False)
class ExpertTable:
    """The experts of one module. A pass uses those groups that its router chooses."""

    name: str  # of the module
    module: nn.Module
    groups: list[ParamGroup]  # by expert
    packed: dict[str, PackedParam]  # by their names in the module; empty where experts are modules

    def rows_of(self, expert: int) -> dict[str, nn.Parameter]:
        """An expert's rows of the packed parameters."""
        return {name: packed.rows[expert] for name, packed in self.packed.items()}


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows as one tensor."""
    return torch.stack(list(rows))
