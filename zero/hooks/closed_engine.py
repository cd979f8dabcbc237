"""Hooks that a closed engine leaves on its model: calling a unit raises, as the parameters are
gone.

Another engine may get the modules, and has to bring values: the parameters are on the meta device
then. Parameters that were put in their place (`load_state_dict(assign=True)`) are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.tiers.errors import StateError
from offload.zero.groups.discovery import Unit
from offload.zero.tensors.local_tensors import is_dtensor


@dataclass(frozen=True)
class Closed:
    """The error texts of a model whose tiers are closed."""

    what: str
    again: str  # how to go on
    keep: str  # what would have kept the parameters

    @property
    def text(self) -> str:
        """The error of a use after closing."""
        return f"{self.what}; {self.again}"

    def without_values(self, why: str) -> str:
        """The error of a use of parameters that were dropped."""
        return (
            f"{self.what}, and the model's parameters are gone ({why}); build the model anew, or "
            "give it to offload.initialize or offload.dispatch with weights= "
            f"({self.keep} would have kept them)"
        )


ENGINE = Closed(
    "the engine is closed", "make a new one with offload.initialize",
    "engine.save_checkpoint, or engine.close(keep='host'),",
)  # fmt: skip
DISPATCHED = Closed(
    "this dispatched model's tiers are closed",
    "build it anew, or give it to offload.dispatch with weights=",
    "offload.dispatched(model).close(keep='host')",
)  # fmt: skip


class Refusal:
    """A hook on the units of a closed engine, installed on creation."""

    def __init__(
        self, units: Sequence[Unit], params: Sequence[tuple[nn.Parameter, type]], text: str
    ) -> None:  # fmt: skip
        """`params` with their own classes. `text` is what a call raises."""
        self._text = text
        self._params = {id(param): (param, own) for param, own in params}  # without values
        self._handles = {
            id(unit.module): unit.module.register_forward_pre_hook(self, prepend=True)
            for unit in units
        }

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.lacks(module):
            raise StateError(self._text)

    def __reduce__(self) -> Any:
        """Return a refusal of nothing: a copied module has parameters of its own."""
        return Refusal, ((), (), self._text)

    @staticmethod
    def of(model: nn.Module) -> list[Refusal]:
        """Return the refusals that closed engines left on a model or parts of it."""
        hooks = [h for module in model.modules() for h in module._forward_pre_hooks.values()]
        return list(dict.fromkeys(hook for hook in hooks if isinstance(hook, Refusal)))

    def has(self, param: nn.Parameter) -> bool:
        """Whether it is one of those without values."""
        return id(param) in self._params

    def lacks(self, module: nn.Module) -> bool:
        """Whether a module has a parameter without values."""
        return any(map(self.has, module.parameters()))

    def lift(self, model: nn.Module) -> None:
        """Let another engine take over the closed engine's modules and parameters in `model`.

        Raises StateError if a graph of the closed engine still holds a parameter.
        """
        here = {id(param) for param in model.parameters()}
        with torch._C.DisableTorchFunctionSubclass():
            for param, own in self._params.values():
                if id(param) in here:
                    param.__class__ = own
                    _empty(param)
        for module in model.modules():
            handle = self._handles.pop(id(module), None)
            if handle is not None:
                handle.remove()


def _empty(param: nn.Parameter) -> None:
    """Move a parameter to the meta device, as the same object. Raises StateError if it is held."""
    if is_dtensor(param):
        raise StateError(
            "a closed engine's model of DTensors cannot be given to another one; build it anew"
        )
    empty = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, hooks):
            setattr(empty, hooks, getattr(param, hooks))
    try:
        torch._C._swap_tensor_impl(param, empty)
    except RuntimeError as error:
        raise StateError(
            "a loss or an output of the closed engine's model still holds its parameters "
            f"({error}); delete it before offload.initialize"
        ) from error
