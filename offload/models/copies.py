"""`copy.deepcopy` of a model in tiers, or of modules of it.

The copy is an ordinary model, as `close(keep="host")` would leave one. Its parameters are tensors
of their own in RAM, tied as before and without gradients; whatever is not the engine's is copied as
PyTorch copies it. Nothing of the engine is on the copy, and the model stays in its tiers.

PyTorch copies a module by what `__reduce_ex__` returns; here the module has one of its own. It says
what the module would without the engine, and brings the values of all its parameters, for the memo.
(An attribute `__deepcopy__` would also be that of models around the module, such as PEFT's, which
look in it for what they do not have.)
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.group import NO_PICKLES
from offload.zero.groups.store import WeightStore
from offload.zero.hooks.forwards import ReplacedForward
from offload.zero.hooks.unit_hooks import installed_call

_HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and
          "hooks" in name]  # fmt: skip
# ... and attributes of modules that engines set
_ATTRIBUTES = (
    "_apply", "__reduce_ex__", "__deepcopy__", "save_pretrained", "_offload_expert_weights",
    "_is_accelerate_prepared", "on_chosen", "compile",
)  # fmt: skip


class Copies:
    """All modules with parameters in tiers copy themselves so, until `remove`."""

    def __init__(
        self, model: nn.Module, store: WeightStore,
        copied: Callable[[Collection[nn.Parameter]], Mapping[int, nn.Parameter]],
    ) -> None:  # fmt: skip
        """`copied` gives ordinary parameters with the values of those in tiers, by their ids."""
        self._store = store
        self._copied = copied
        self._modules = [each for each in model.modules() if self._managed(each)]
        for module in self._modules:
            vars(module)["__reduce_ex__"] = _Reduced(module, self)
            if hasattr(type(module), "__deepcopy__"):
                vars(module)["__deepcopy__"] = _Copied(module, self)

    def remove(self) -> None:
        """PyTorch copies the modules again."""
        for module in self._modules:
            for name in ("__reduce_ex__", "__deepcopy__"):
                if isinstance(vars(module).get(name), _Reduced):
                    del vars(module)[name]

    def _managed(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if self._store.spec_of(p) is not None]

    def put(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Let `memo` have copies of all tensors of a module."""
        params = [param for param in module.parameters() if id(param) not in memo]
        managed = [param for param in params if self._store.spec_of(param) is not None]
        if managed:
            memo.update(self._copied(managed))
        with torch.inference_mode(False):  # a copy made in an evaluation can be trained
            for tensor in (*params, *module.buffers()):
                made = copy.deepcopy(tensor, memo)
                if made.device.type != "cpu":
                    made.data = made.data.to("cpu")


class _Reduced:
    """A module's `__reduce_ex__`."""

    def __init__(self, module: nn.Module, copies: Copies) -> None:
        self._module = module
        self._copies = copies

    def __call__(self, protocol: Any) -> Any:
        module = self._module
        with _without_the_engine(module):
            reduced: Any = module.__reduce_ex__(protocol)
            make, args, *rest = reduced
            rest = [dict(each) if each is vars(module) else each for each in rest]
        return _make, (_Tensors(module, self._copies), make, *args), *rest


class _Copied(_Reduced):
    """The `__deepcopy__` of a module whose class has one."""

    def __call__(self, memo: dict[int, Any]) -> Any:
        self._copies.put(self._module, memo)
        with _without_the_engine(self._module):
            return copy.deepcopy(self._module, memo)


class _Tensors:
    """The parameters and buffers of a module, which are copied before its other attributes."""

    def __init__(self, module: nn.Module, copies: Copies) -> None:
        self._module = module
        self._copies = copies

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self._copies.put(self._module, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(NO_PICKLES)


def _make(_: None, make: Callable[..., Any], *args: Any) -> Any:
    return make(*args)


@contextmanager
def _without_the_engine(module: nn.Module) -> Iterator[None]:
    """Inside, the module's attributes are those that it would have without its engine."""
    own = vars(module)
    bare = _bare(own)
    aside = {name: value for name, value in own.items() if bare.get(name, own) is not value}
    try:
        for name in aside:
            own.pop(name)
            if name in bare:
                own[name] = bare[name]
        yield
    finally:
        own.update(aside)


def _bare(own: Mapping[str, Any]) -> dict[str, Any]:
    bare = dict(own)
    for name in _ATTRIBUTES:
        if name in bare and (bare[name] is True or _is_ours(bare[name])):
            del bare[name]
    for name, below in (
        ("forward", ReplacedForward.below), ("_compiled_call_impl", installed_call)
    ):  # fmt: skip
        if name in bare:
            bare[name] = below(bare[name])
            if bare[name] is None:
                del bare[name]
    ours = {key for name in _HOOKS for key, hook in own[name].items() if _is_ours(hook)}
    for name in _HOOKS:
        if ours & own[name].keys():
            bare[name] = OrderedDict((k, v) for k, v in own[name].items() if k not in ours)
    return bare


def _is_ours(value: Any) -> bool:
    """Whether a hook's or a method's code is of this package."""
    value = getattr(value, "func", value)  # of a partial
    return str(getattr(value, "__module__", "")).partition(".")[0] == "offload"
