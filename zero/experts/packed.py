"""Packed parameters: one tensor with a row per expert, whose rows are in groups of their own.

the model has    experts.gate_up_proj [E, 2I, D]     a placeholder, of a class that answers for
                                                     the rows (released.py)
groups have      experts.gate_up_proj[0] [2I, D]     leaves of autograd: values, gradients and
                 experts.gate_up_proj[1] ...         optimizer states, each in its tier
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec


@dataclass(eq=False)
class PackedParam:
    """One parameter of a model, and its rows along the first dimension."""

    param: nn.Parameter
    names: tuple[str, ...]  # in the model
    rows: list[nn.Parameter]
    own_class: type
    places: list[tuple[ParamGroup, int]] = field(default_factory=list)  # of the rows
    is_shown: bool = False  # its data are the values, for now

    @classmethod
    def of(cls, param: nn.Parameter, names: tuple[str, ...]) -> PackedParam:
        """Make a packed parameter; its rows begin as views, each with a version of its own."""
        rows = [nn.Parameter(row.data, param.requires_grad) for row in param.detach()]
        return cls(param, names, rows, type(param))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def spec(self) -> ParamSpec:
        """The parameter's spec, as if it lay in a buffer of its own."""
        group, index = self.places[0]
        trainable = group.layout.params[index].trainable
        return ParamSpec(self.names, tuple(self.param.shape), trainable)

    def follow_requires_grad(self) -> None:
        """Let rows require gradients if the parameter does, which users may have changed."""
        with torch._C.DisableTorchFunctionSubclass():
            wanted = self.param.requires_grad
            if self.rows[0].requires_grad != wanted:
                for row in self.rows:
                    row.requires_grad_(wanted)

    @property
    def has_gradient(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.param.grad is not None


@dataclass(eq=False)
class ExpertTable:
    """The experts of one module. A pass uses those groups that its router chooses."""

    name: str  # of the module
    groups: list[ParamGroup] = field(default_factory=list)  # by expert
    module: nn.Module | None = None  # of packed experts
    packed: dict[str, PackedParam] = field(default_factory=dict)  # by their names in the module

    def rows_of(self, expert: int) -> dict[str, nn.Parameter]:
        return {name: packed.rows[expert] for name, packed in self.packed.items()}
