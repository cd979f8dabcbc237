"""`model.state_dict()` and `model.load_state_dict()` on a model whose parameters are in tiers.

Hooks on the modules that own parameters: a saved entry becomes a copy of the full parameter, after
its pending update; a loaded one is written through to the tiers, master included.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.store import WeightStore
from offload.zero.groups.weight_values import WeightValues


class StateDictHooks:
    """The state dict hooks of one model, installed on creation and taken off by `remove`."""

    def __init__(self, model: nn.Module, store: WeightStore, values: WeightValues) -> None:
        self._model = weakref.ref(model)
        self._store = store
        self._values = values
        self._leaves_parameters = False
        self._contexts: dict[int, Any] = {}
        # of tied parameters, by id: what the last state dict has, and of which version
        self._copied: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._versions: dict[int, int] = {}
        # One for all modules. A function, not a method: torch marks the first with an attribute.
        self._on_saved = lambda *args: self._saved(*args)
        self._on_load, self._on_loaded = self._before_load, self._after_load
        owned = [p for module in model.modules() for p in self._own(module).values()]
        self._names = Counter(map(id, owned))
        self._installed: list[RemovableHandle] = [
            model.register_state_dict_pre_hook(lambda *args: values.adopt_changes()),
            model.register_load_state_dict_pre_hook(lambda *args: self._begin_load(*args)),
        ]
        for module in model.modules():
            if self._own(module):
                self._installed += [
                    module.register_state_dict_post_hook(self._on_saved),
                    module.register_load_state_dict_pre_hook(self._on_load),
                    module.register_load_state_dict_post_hook(self._on_loaded),
                ]

    def _own(self, module: nn.Module) -> dict[str, nn.Parameter]:
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        return {name: p for name, p in own if self._store.spec_of(p) is not None}

    def _saved(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, param in self._own(module).items():
            if state_dict.get(prefix + name, param) is not param:  # with keep_vars=True it is
                left = self._leaves_parameters
                state_dict[prefix + name] = param if left else self._copy(param, state_dict)

    def _copy(self, param: nn.Parameter, state_dict: dict[str, Any]) -> torch.Tensor:
        """Return a copy of a parameter. All names of a tied parameter share its memory, by which
        writers of files recognise it."""
        place = self._store.group_of(param)
        if self._names[id(param)] == 1 or place is None:  # packed ones are not tied
            return self._values.give_out(param)
        known, version = self._copied.get(id(param)), place[0].writes.version
        is_there = any(value is known for value in state_dict.values())
        if known is not None and is_there and self._versions[id(param)] == version:
            return known.detach()
        self._copied[id(param)] = copied = self._values.give_out(param)
        self._versions[id(param)] = version
        return copied

    def _begin_load(
        self, model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        if self._leaves_parameters:
            return
        _refuse_assigning(model, metadata)
        loading = set()
        for name, module in model.named_modules():
            path = f"{prefix}{name}." if name else prefix
            set_here = [p for each, p in self._own(module).items() if path + each in state_dict]
            loading |= {spec.name for p in set_here if (spec := self._store.spec_of(p))}
            if "0" not in module._modules:
                own = [
                    f"{prefix}{name}.{each}" for each, p in self._own(module).items() if p.dim() > 2
                ]
                _refuse_single_experts(own, f"{prefix}{name}.0.", state_dict)
        self._values.adopt_changes(loading=loading)

    @contextmanager
    def parameters_left(self, *, loading: bool = False) -> Iterator[None]:
        """Inside, state dicts have the parameters themselves; with `loading`, loading one changes
        what modules keep beside them. Parameters are neither read nor written, except by a module's
        own code."""
        model = self._model()
        assert model is not None, "the caller holds the model"
        places = [(p, self._store.group_of(p)) for p in model.parameters()]
        here = [p for p, at in places if at and at[0].is_gathered]
        self._leaves_parameters = True
        try:
            # copied onto itself, one would count as written
            with self._values.gathered(here) if loading else nullcontext():
                yield
        finally:
            self._leaves_parameters = False

    def _before_load(
        self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any
    ) -> None:
        if self._leaves_parameters:
            return
        _refuse_assigning(module, metadata)
        self._after_load(module, None)  # left open if an earlier load raised half-way
        context = self._values.gathered(list(self._own(module).values()))
        context.__enter__()
        self._contexts[id(module)] = context

    def _after_load(self, module: nn.Module, _: Any) -> None:
        context = self._contexts.pop(id(module), None)
        if context is not None:
            context.__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._installed:
            handle.remove()
        self._installed.clear()


def _refuse_assigning(module: nn.Module, metadata: Any) -> None:
    """Raise UnsupportedError, before anything is changed, for a load that replaces parameters."""
    by_swapping = torch.__future__.get_swap_module_params_on_conversion()
    if not by_swapping and not metadata.get("assign_to_params_buffers", False):
        return
    how = "torch.__future__.set_swap_module_params_on_conversion(True)"
    raise UnsupportedError(
        f"{type(module).__name__}.load_state_dict({'' if by_swapping else 'assign=True'}) "
        f"{f'after {how} ' if by_swapping else ''}puts other tensors in the place of parameters "
        "that are in tiers; load without, and the values are written into the parameters"
    )


def _refuse_single_experts(tables: list[str], first: str, state_dict: dict[str, Any]) -> None:
    """Refuse single experts in a load that is not strict, which would leave these `tables` as they
    are. (transformers' own Trainer resumes so from the files that it has written.)"""
    if not tables or any(name in state_dict for name in tables):
        return
    single = next((key for key in state_dict if key.startswith(first)), None)
    if single is not None:
        raise UnsupportedError(
            f"{tables[0]} has all experts in one tensor, and the state dict has them one by one "
            f"({single}, ...), as files of the hub do; resume with OffloadTrainer, which merges "
            "them, or open the folder with offload.open_pretrained"
        )
