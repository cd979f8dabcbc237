"""A hook on each trainable parameter, which takes its gradient from autograd."""

import weakref
from collections.abc import Callable, Collection
from typing import NoReturn

import torch
from torch import nn

from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.store import WeightStore
from offload.zero.hooks.compilers import uncompiled
from offload.zero.tensors.released import is_released

# Takes the gradient of a group's parameter (both by index) out of `param.grad`, if it is new.
Take = Callable[[int, int, torch.Tensor], None]


class GradientHooks:
    """The hooks on `params`, all trainable parameters of one store."""

    def __init__(self, store: WeightStore, params: Collection[nn.Parameter], take: Take) -> None:
        self._store = store
        self._params = params
        self._take = take
        self._hook = _Hook(self)
        for param in params:
            # the handle is not kept: of thousands of parameters they are as many KiB
            param.register_post_accumulate_grad_hook(self._hook)

    @defer_signals
    def arrived(self, param: torch.Tensor) -> None:
        with self._store.one_thread:
            place = self._store.group_of(param)
            assert place is not None, "hooked as one of a group"
            self._take(place[0].index, place[1], param)

    def remove(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter has its own
            for param in self._params:
                hooks = param._post_accumulate_grad_hooks or {}
                for number in [number for number, each in hooks.items() if each is self._hook]:
                    del hooks[number]


class _Hook:
    """A hook without references: the garbage collector does not see those of tensors' hooks."""

    def __init__(self, hooks: GradientHooks) -> None:
        self._hooks = weakref.ref(hooks)

    @uncompiled
    def __call__(self, param: torch.Tensor) -> None:
        hooks = self._hooks()
        if hooks is not None:  # its engine is there
            hooks.arrived(param)


def refuse_graph(name: str) -> NoReturn:
    """Raise UnsupportedError: a gradient has a graph of its own."""
    raise UnsupportedError(
        f"backward(create_graph=True): the gradient of {name} would have to keep its graph, and "
        "gradients leave for their tier as they come; use torch.autograd.grad(loss, tensors, "
        "create_graph=True) for what is differentiated twice, and an ordinary backward for the rest"
    )


def is_trained_here(param: nn.Parameter) -> bool:
    """Return whether an engine fetches a parameter's values, or waits for its gradients."""
    if is_released(param):
        return True
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, _Hook) for hook in hooks.values())
