"""What kernels and PyTorch's operations read and write, told to a `CheckedWorld`.

offload's kernels are called by name. For those of the device their twins on the CPU run, with the
same bits, in a tenth of the interpreter's time. Of PyTorch's operations the schema says which
operands are written. One on host memory alone is the thread's own work; all others are launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from offload.kernels.bits import FLOAT_OF, flat_array
from offload.kernels.cpu import gradients, optimizer
from offload.kernels.gpu import triton_gradients, triton_optimizer
from offload.kernels.rules import StateFormat
from offload.tiers.tier import Tier
from offload.zero.step import undo_codes, update
from offload.zero.tensors.paged import PagedTensor

if TYPE_CHECKING:
    from tests.swap.checked_world import CheckedWorld

_WITHOUT_VALUES = frozenset({
    "_unsafe_view", "detach", "empty", "set_", "alias", "empty_like", "empty_strided", "new_empty",
    "resize_", "_has_compatible_shallow_copy_type", "_local_scalar_dense",
})  # fmt: skip
_FORMATS = {
    torch.float32: StateFormat.FP32,
    torch.bfloat16: StateFormat.BF16,
    torch.uint8: StateFormat.INT8,
}


def follow_kernels(world: CheckedWorld, patch: pytest.MonkeyPatch) -> None:
    copy, add, step = gradients.copy_gradient, gradients.add_gradient, optimizer.optimizer_step

    def copy_there(target: Any, source: Any, partials: Any) -> None:
        world.launch("the kernel of a gradient", [source], [target, partials])
        floats = FLOAT_OF[target.dtype], FLOAT_OF[source.dtype]
        with _disable_current_modes():
            copy(flat_array(target), flat_array(source), *floats, partials.numpy())

    def add_there(target: Any, source: Any, partials: Any) -> None:
        world.launch("the kernel of a gradient", [source, target], [target, partials])
        with _disable_current_modes():
            add(flat_array(target), flat_array(source), FLOAT_OF[source.dtype], partials.numpy())

    def step_there(
        grad: Any, weight: Any, states: Any, scalars: Any, *, scales: Any = (), **more: Any
    ) -> None:
        extra = [more[name] for name in ("low", "master") if more[name] is not None]
        world.launch("the kernel of an update", [grad], [weight, *states, *scales, *extra])
        arrays = {
            name: None if x is None else x.numpy() for name, x in more.items() if name != "noise"
        }
        with _disable_current_modes():
            step(
                flat_array(grad), flat_array(weight), [_array(x) for x in states], scalars,
                grad_float=FLOAT_OF[grad.dtype], weight_float=FLOAT_OF[weight.dtype],
                state_format=_FORMATS[states[0].dtype], scales=[x.numpy() for x in scales],
                noise=more["noise"], **arrays,
            )  # fmt: skip

    patch.setattr(triton_gradients, "copy_gradient", copy_there)
    patch.setattr(triton_gradients, "add_gradient", add_there)
    patch.setattr(triton_optimizer, "optimizer_step", step_there)

    def copy_here(target: Any, source: Any, *args: Any) -> None:
        world.compute("copy_gradient", _on_host(world, source), _in_tiers(world, [target]))
        copy(target, source, *args)

    def add_here(target: Any, source: Any, *args: Any) -> None:
        read = [*_on_host(world, source), *_in_tiers(world, [target])]
        world.compute("add_gradient", read, _in_tiers(world, [target]))
        add(target, source, *args)

    def step_here(grad: Any, weight: Any, states: Any, *args: Any, **more: Any) -> None:
        extra = [*more["scales"], more["low"], more["master"]]
        written = _in_tiers(world, [weight, *states, *extra])
        world.compute("optimizer_step", _in_tiers(world, [grad]), written)
        step(grad, weight, states, *args, **more)

    def with_code(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def here(grad: Any, weight: Any, states: Any, *args: Any, **more: Any) -> Any:
            extra = [more[name] for name in ("low", "master", "code")]
            written = _in_tiers(world, [weight, *states, *extra])
            world.compute(kernel.__name__, _in_tiers(world, [grad]), written)
            return kernel(grad, weight, states, *args, **more)

        return here

    for kernel in undo_codes.undoable_step, undo_codes.undo_step:
        patch.setattr(undo_codes, kernel.__name__, with_code(kernel))
    patch.setattr(gradients, "copy_gradient", copy_here)
    patch.setattr(gradients, "add_gradient", add_here)
    patch.setattr(update, "optimizer_step", step_here)


def _array(state: torch.Tensor) -> Any:
    return state.numpy() if state.dtype is torch.uint8 else flat_array(state)


def _on_host(world: CheckedWorld, array: Any) -> list[torch.Tensor]:
    """What is read there. A gradient on the device is fetched by `gradient.to("cpu")`, which does
    nothing here."""
    found = _bytes_of(array)
    if world.tier_at(found.data_ptr()) is Tier.HOST:
        return [found]
    world.launch("a fetch", [found], [])
    world.fetched()
    return []


def _in_tiers(world: CheckedWorld, arrays: list[Any]) -> list[torch.Tensor]:
    """The arrays in tiers, as tensors; no other agent knows of others."""
    tensors = [_bytes_of(array) for array in arrays if array is not None]
    return [tensor for tensor in tensors if world.tier_at(tensor.data_ptr()) is not None]


def _bytes_of(array: Any) -> torch.Tensor:
    with _disable_current_modes():
        return torch.from_numpy(array.reshape(-1).view("uint8"))


@contextmanager
def operations(world: CheckedWorld) -> Iterator[None]:
    """Inside, PyTorch's operations of this thread are followed."""
    with _Operations(world):
        yield


class _Operations(TorchDispatchMode):
    def __init__(self, world: CheckedWorld) -> None:
        super().__init__()
        self._world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, PagedTensor) for kind in types):
            return NotImplemented  # it has no memory of its own, and says what it is made of
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = _schema_of(func)
        if schema is None:
            return result
        read, written = _operands(schema, args, kwargs, result)
        self._kind([*read, *written])(schema.name, read, written)
        if schema.name == "_to_copy" and kwargs.get("device") is not None:  # to the CPU
            self._world.fetched()
        return result

    def _kind(self, tensors: list[torch.Tensor]) -> Callable[..., None]:
        tiers = {self._world.tier_at(each.data_ptr()) for each in tensors}
        return self._world.compute if tiers == {Tier.HOST} else self._world.launch


@dataclass(frozen=True)
class _Schema:
    name: str
    arguments: tuple[tuple[str, bool], ...]  # their names, and whether they are written


@cache
def _schema_of(func: Any) -> _Schema | None:
    """None where an operation touches no values, or none that anybody else does."""
    found = func._schema
    name = found.name.split("::")[-1]
    aliases = [each.alias_info for each in found.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if is_view or name in _WITHOUT_VALUES:
        return None
    infos = [(each.name, each.alias_info) for each in found.arguments]
    return _Schema(name, tuple((key, bool(info and info.is_write)) for key, info in infos))


def _operands(
    schema: _Schema, args: Any, kwargs: Any, result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    read, written = [], strided(result)
    for index, (name, changes) in enumerate(schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(name)
        (written if changes else read).extend(strided(given))
    return read, written


def strided(tree: Any) -> list[torch.Tensor]:
    """The tensors in it that have memory."""
    if tree is None or isinstance(tree, (int, float, str, torch.dtype)):
        return []
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.device.type == "cpu" and leaf.layout is torch.strided]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a strided tensor reaches."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
