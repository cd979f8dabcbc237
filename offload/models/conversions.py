"""Conversions of a model in tiers: `model.half()`, `.to(...)`, `.cuda()`, `.to_empty(...)`, ...

Parameters in tiers have the format and the device that the configuration says. What would change
either is refused at the call, by name and before anything is changed; what changes neither does
what it does to any model, buffers included. All of them call `Module._apply`, here one that asks
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.group import NO_COPIES
from offload.zero.groups.store import WeightStore


class Conversions:
    """Checks conversions of all modules that have parameters in tiers, until `remove`."""

    def __init__(self, model: nn.Module, store: WeightStore) -> None:
        self._store = store
        self._asked = False  # by a module around the one that is converted now
        self._modules = [each for each in model.modules() if self._managed_in(each)]
        for module in self._modules:
            vars(module)["_apply"] = _Asking(module, self)

    def remove(self) -> None:
        """Let the modules convert by themselves again."""
        for module in self._modules:
            if isinstance(vars(module).get("_apply"), _Asking):
                del vars(module)["_apply"]

    def _managed_in(self, module: nn.Module) -> str | None:
        """Return the name of the first parameter of a module that is in tiers."""
        specs = map(self._store.spec_of, module.parameters())
        return next((spec.name for spec in specs if spec is not None), None)

    def apply(self, module: nn.Module, function: Callable[[Any], Any], recurse: bool) -> nn.Module:
        """Call `module._apply(function, recurse)`. Raises UnsupportedError for a conversion that
        tiers cannot follow."""
        call = _name_of(function)
        if not self._asked:
            self._check(module, call, function)

        def applied(tensor: Any) -> Any:
            # torch's own functions were asked; what another one makes is written to the tiers
            keeps = bool(call) and self._store.spec_of(tensor) is not None
            return tensor if keeps else function(tensor)

        before, self._asked = self._asked, True
        try:
            found: nn.Module = type(module)._apply(module, applied, recurse)
            return found
        finally:
            self._asked = before

    def _check(self, module: nn.Module, call: str, function: Callable[[Any], Any]) -> None:
        """Raise UnsupportedError if the function would change the format, the shape or the device
        of parameters in tiers, or share or replace them."""
        name = self._managed_in(module)
        what = f"{type(module).__name__}.{call or '_apply'}()"
        if call == "share_memory":
            raise UnsupportedError(
                f"{what}: the memory of {name} is of its tier, which other processes cannot share; "
                "give them model.state_dict(), or a checkpoint"
            )
        future = torch.__future__
        if (
            future.get_overwrite_module_params_on_conversion()
            or future.get_swap_module_params_on_conversion()
        ):
            raise UnsupportedError(
                f"{what} after torch.__future__.set_overwrite_module_params_on_conversion or "
                f"set_swap_module_params_on_conversion would put another tensor in the place of "
                f"{name}, which is in tiers; set it to False again"
            )
        # all parameters in tiers have one format and are computed with on one device
        probe = torch.empty(1, 1, dtype=self._store.dtype, device=self._store.device)
        becomes = function(probe)
        if (becomes.shape, becomes.dtype, becomes.device) == (
            probe.shape, probe.dtype, probe.device,
        ):  # fmt: skip
            return
        raise UnsupportedError(
            f"{what} would make {name} {_described(becomes)}, and in its tiers it is "
            f"{_described(probe)}; set precision (fp32, bf16 or fp16) and device in the "
            "configuration, and leave out what moves models to save memory; take "
            "model.state_dict() for converted copies, and close the engine, or "
            "offload.dispatched(model), to drop the values"
        )


def _described(tensor: torch.Tensor) -> str:
    shape = "" if tensor.dim() == 2 else " of another shape"
    return f"{tensor.dtype} on {tensor.device}{shape}"


def _name_of(function: Callable[[Any], Any]) -> str:
    """Return the name of the `nn.Module` method that passes `function`; empty for others."""
    if getattr(function, "__module__", "") != nn.Module.__module__:
        return ""
    kind, _, rest = getattr(function, "__qualname__", "").partition(".")
    return rest.partition(".")[0] if kind == nn.Module.__name__ else ""


class _Asking:
    """A module's `_apply`."""

    def __init__(self, module: nn.Module, conversions: Conversions) -> None:
        self._module = module
        self._conversions = conversions

    def __call__(self, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        return self._conversions.apply(self._module, fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(NO_COPIES)
