"""A model whose kernels lag behind its calls, as a GPU's do, without a GPU.

Inside `lagging`, an operation on device memory (a range of host memory that stands for it) returns
at once with a tensor of the right shape and nothing in it. Its values are computed when the stream
gets there: when somebody waits for an event behind it, or asks for a value (`item`, `to("cpu")`).
So whoever overwrites what a kernel has still to read, or reads what it has still to write, has
other bits, in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.kernels.gpu import triton_gradients, triton_optimizer
from tests.swap.stream_simulation import CUDA, World

_ALIGN = 64
_ASKING = {Tensor.to, Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__}


class DeviceMemory:
    """Ranges of host memory that stand for a device's: its tier, and what PyTorch gives out, none
    of it twice."""

    def __init__(self, tier: Tensor, nbytes: int = 256 << 20) -> None:
        self._free = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0
        self._ranges = [
            range(each.data_ptr(), each.data_ptr() + each.numel()) for each in (tier, self._free)
        ]
        self._keep = tier

    def has(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(address in each for each in self._ranges)

    def move(self, tensor: Tensor) -> Tensor:
        """A tensor of the same form, in device memory; no values."""
        storage = tensor.untyped_storage()
        start, nbytes = self._used, storage.nbytes()
        self._used += math.ceil(nbytes / _ALIGN) * _ALIGN
        assert self._used <= self._free.numel(), "the test takes more device memory than there is"
        return over(self._free.data_ptr() + start, nbytes, tensor)


def over(address: int, nbytes: int, like: Tensor) -> Tensor:
    """A tensor of `like`'s form over memory that it does not keep."""
    storage = torch._C._construct_storage_from_data_pointer(
        address, torch.device("cpu"), max(nbytes, 1)
    )
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def addressed(tensor: Tensor) -> Tensor:
    """As a kernel has it: an address, which keeps nothing alive and is no use of a storage."""
    storage = tensor.untyped_storage()
    return over(storage.data_ptr(), storage.nbytes(), tensor)


class Lag(TorchDispatchMode):
    """Operations on device memory are queued on the current stream."""

    def __init__(self, world: World, memory: DeviceMemory) -> None:
        super().__init__()
        self.world, self.memory = world, memory
        self.queued = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if not any(map(self.memory.has, given)):
            return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        if not written:
            return self._outcome(func, args, kwargs)
        if not all(map(self.memory.has, written)):  # to the host, which waits
            self.wait()
            return func(*args, **kwargs)
        self._queue(func, args, kwargs)
        return written[0] if len(func._schema.returns) == 1 else None

    def _outcome(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Views and shapes are known at once; values later."""
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor | tuple | list):  # a number, a truth: somebody waits for it
            self.wait()
            return func(*args, **kwargs)
        moved = tree_map_only(Tensor, self._moved, made)
        pairs = enumerate(zip(tree_leaves(moved), tree_leaves(made), strict=True))
        fresh = {place: addressed(new) for place, (new, old) in pairs if new is not old}
        if fresh:
            self._queue(func, args, kwargs, fresh)
        return moved

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if self.memory.has(tensor) else self.memory.move(tensor)

    def _queue(
        self, func: Any, args: Any, kwargs: Any, outputs: Mapping[int, Tensor] | None = None
    ) -> None:
        args, kwargs = tree_map_only(Tensor, self._as_kernels_have_it, (args, kwargs))

        def run() -> None:
            made = tree_leaves(func(*args, **kwargs))
            for place, output in (outputs or {}).items():
                output.copy_(made[place])

        self.queued += 1
        self.world.current().put(run)

    def _as_kernels_have_it(self, tensor: Tensor) -> Tensor:
        return addressed(tensor) if self.memory.has(tensor) else tensor.detach().clone()

    def wait(self) -> None:
        self.world.current().synchronize()


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation changes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


class Asked(TorchFunctionMode):
    """Calls that wait for a device's values."""

    def __init__(self, lag: Lag) -> None:
        super().__init__()
        self._lag = lag

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is not None:  # said to be on the device
            return self._lag.memory.move(func(*args, **kwargs))
        if func not in _ASKING or not self._lag.memory.has(args[0]):
            return func(*args, **kwargs)
        if func is Tensor.to and "cpu" not in map(str, (*args[1:], *kwargs.values())):
            return func(*args, **kwargs)
        self._lag.wait()
        with _disable_current_modes():
            found = func(*args, **kwargs)
            same = isinstance(found, Tensor) and self._lag.memory.has(found)
            return found.clone() if same else found


@contextmanager
def lagging(world: World, tier: Tensor, patch: pytest.MonkeyPatch) -> Iterator[Lag]:
    """This thread's operations on device memory lag, and our kernels do in every thread. `tier`:
    the memory of the device's tier (1D uint8). Afterwards there is no lag."""
    for module in (triton_gradients, triton_optimizer):
        patch.setattr(module, "launch", _queued(world, module.launch))
    lag = Lag(world, DeviceMemory(tier))
    with Asked(lag), lag:
        yield lag
    with world.lock:
        for stream in world.streams:
            stream.eager = True
    world.synchronize(CUDA)


def _queued(world: World, launch: Callable[..., None]) -> Callable[..., None]:
    def put(kernel: Any, programs: int, tensors: Any, *args: Any, **options: Any) -> None:
        tensors = tree_map_only(Tensor, addressed, tensors)
        world.current().put(lambda: launch(kernel, programs, tensors, *args, **options))

    return put
