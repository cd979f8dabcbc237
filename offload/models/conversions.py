"""Conversions of a model in tiers: `model.half()`, `.to(...)`, `.cuda()`, `.to_empty(...)`, ...

Parameters in tiers have the format and the device that the configuration says. What would change
either is refused at the call, by name and before anything is changed; what changes neither does
what it does to any model, buffers included. All of them call `Module._apply`, here one that asks
first. `Module.compile` asks, too: a module around others cannot be compiled as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.bits import FLOAT_OF
from offload.zero.groups.store import WeightStore
from offload.zero.hooks.compilers import refuse_one_graph


class Conversions:
    """Checks conversions of all modules that have parameters in tiers, until `remove`."""

    def __init__(self, model: nn.Module, store: WeightStore) -> None:
        self._store = store
        self._asked = False  # by a module around the one that is converted now
        self._modules = [each for each in model.modules() if any(self._managed(each))]
        for module in self._modules:
            vars(module)["_apply"] = _Asking(module, self)
            inner = any(any(self._managed(child)) for child in module.children())
            if inner and getattr(module.compile, "__func__", None) is nn.Module.compile:
                vars(module)["compile"] = partial(_compile, module)

    def remove(self) -> None:
        """Let the modules convert by themselves again."""
        for module in self._modules:
            if isinstance(vars(module).get("_apply"), _Asking):
                del vars(module)["_apply"]
            if getattr(vars(module).get("compile"), "func", None) is _compile:
                del vars(module)["compile"]

    def _managed(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for param in module.parameters():
            spec = self._store.spec_of(param)
            if spec is not None:
                yield spec.name, param

    def apply(self, module: nn.Module, function: Callable[[Any], Any], recurse: bool) -> nn.Module:
        """Call `module._apply(function, recurse)`. Raises UnsupportedError for a conversion that
        tiers cannot follow."""
        kind, call = type(module).__name__, _name_of(function)
        if not self._asked:
            for name, param in self._managed(module):
                _check(kind, call, function, name, param)

        def applied(tensor: Any) -> Any:
            spec = self._store.spec_of(tensor)
            if spec is None:
                return function(tensor)
            if call:
                return tensor
            becomes = function(tensor)
            if isinstance(becomes, torch.Tensor):
                _refuse_others(f"{kind}._apply", spec.name, tensor, becomes)
            return becomes

        before, self._asked = self._asked, True
        try:
            with _parameters_stay():
                found: nn.Module = type(module)._apply(module, applied, recurse)
                return found
        finally:
            self._asked = before


def _check(
    kind: str, call: str, function: Callable[[Any], Any], name: str, param: nn.Parameter
) -> None:
    """Raise UnsupportedError if the function would change a parameter's format, shape or device."""
    if call == "share_memory":
        raise UnsupportedError(
            f"{kind}.share_memory(): the memory of {name} is of its tier, which other processes "
            "cannot share; give them model.state_dict(), or a checkpoint"
        )
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype, device = param.shape, param.dtype, param.device
    if call:  # what torch's own functions do depends on neither values nor shape
        probe = torch.empty(0, dtype=dtype, device=device)
        _refuse_others(f"{kind}.{call}", name, probe, function(probe))
        return
    probe = torch.empty(shape, dtype=dtype, device="meta")
    try:
        becomes = function(probe)
    except Exception:  # noqa: BLE001 - it needs values: it is asked with them
        return
    if isinstance(becomes, torch.Tensor):
        _refuse_others(f"{kind}._apply", name, probe, becomes)


def _refuse_others(call: str, name: str, is_now: torch.Tensor, becomes: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype, device = is_now.shape, is_now.dtype, is_now.device
    if (becomes.shape, becomes.dtype, becomes.device) == (shape, dtype, device):
        return
    if becomes.shape != shape:
        change = f"of shape {tuple(becomes.shape)}, and it is of shape {tuple(shape)}"
        remedy = "only values of the same shape can be written (engine.gathered)"
    elif becomes.dtype != dtype:
        change = f"{becomes.dtype}, and it is {dtype}"
        remedy = "tiers hold fp32, bf16 and fp16"
        if becomes.dtype in FLOAT_OF:
            precision = FLOAT_OF[becomes.dtype].name.lower()
            remedy = (
                f"open the model in that format, with precision: {precision} in the configuration; "
                "a pipeline that casts its components then changes nothing"
            )
        remedy += "; for converted copies, take model.state_dict()"
    else:
        change = f"a tensor on {becomes.device}, and it is computed with on {device}"
        remedy = (
            f"set device: {becomes.device.type} in the configuration, and leave out what moves "
            "models to save memory (a pipeline's enable_model_cpu_offload): tiers do that"
        )
        if becomes.is_meta:
            remedy = "to drop the values, close the engine, or offload.dispatched(model)"
    raise UnsupportedError(
        f"{call}() would make {name} {change} in its tiers, as the configuration says; {remedy}"
    )


def _name_of(function: Callable[[Any], Any]) -> str:
    """Return the name of the `nn.Module` method that passes `function`; empty for others."""
    if getattr(function, "__module__", "") != nn.Module.__module__:
        return ""
    kind, _, rest = getattr(function, "__qualname__", "").partition(".")
    return rest.partition(".")[0] if kind == nn.Module.__name__ else ""


@contextmanager
def _parameters_stay() -> Iterator[None]:
    """Inside, torch changes parameters in place, whatever its conversion flags say."""
    future = torch.__future__
    overwrite = future.get_overwrite_module_params_on_conversion()
    swap = future.get_swap_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(False)
    future.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        future.set_overwrite_module_params_on_conversion(overwrite)
        future.set_swap_module_params_on_conversion(swap)


def _compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`Module.compile`."""
    if kwargs.get("fullgraph"):
        refuse_one_graph(f"{type(module).__name__}.compile(fullgraph=True)")
    nn.Module.compile(module, *args, **kwargs)


class _Asking:
    """A module's `_apply`."""

    def __init__(self, module: nn.Module, conversions: Conversions) -> None:
        self._module = module
        self._conversions = conversions

    def __call__(self, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        return self._conversions.apply(self._module, fn, recurse)
