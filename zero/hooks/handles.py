"""Saved tensors as handles: autograd keeps the name of a gathered parameter's view, not the view.

`aten::linear` saves `weight.t()`, a view that would keep the whole gathered buffer alive until
backward. A handle `(group, shape, stride, offset)` becomes a view of the buffer that the group has
by then. Other saved tensors go to the hooks that were active before these if there are any
(`save_on_cpu`, a checkpoint around the whole model), else to the keeper of activations if there is
one and it takes them; else they stay. DTensors stay: a write in place is not counted at the local
tensor, so a keeper could not tell two versions apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import isgenerator, unwrap
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.utils.checkpoint

from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.tiers.errors import ModifiedError, StateError
from offload.zero.groups.group import ParamGroup
from offload.zero.hooks.compilers import uncompiled
from offload.zero.tensors.local_tensors import (
    forget_values,
    is_dtensor,
    local_of,
    memory_of,
    rebuilt,
)

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

_CHECKPOINT = unwrap(torch.utils.checkpoint.checkpoint).__code__
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(slots=True, eq=False)
class Handle:
    """A view of a group's flat buffer: sizes, strides and offset in elements of `dtype`. It is
    never changed; a frozen dataclass takes five times as long to make."""

    group: ParamGroup
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    counter: torch.Tensor  # counts versions with what was saved; without values
    counted: int  # when it was saved
    spec: DTensorSpec | None = None  # the DTensor's, if this is its local tensor


@dataclass(slots=True, eq=False)
class _Outer:
    """The result of the outer hooks for a tensor."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any


def active_hooks() -> Hooks | None:
    """Return the saved-tensor hooks that torch would call now."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def take_off_hooks(outer: Hooks | None) -> None:
    """Remove the hooks above `outer`, which an interrupt left behind: it is active again."""
    while (hooks := active_hooks()) is not None and (outer is None or hooks[0] is not outer[0]):
        torch._C._autograd._pop_saved_tensors_default_hooks()


class KeptTensor(Protocol):
    """A saved tensor that a keeper has taken over."""

    def tensor(self) -> torch.Tensor:
        """Return its values as they were when it was kept, without a graph."""


class Keeper(Protocol):
    """Stores saved tensors outside device memory until backward needs them."""

    def keep(self, tensor: torch.Tensor) -> KeptTensor | None:
        """Return an object that gives the values back; None if the tensor stays."""


# A tensor kept as it is, and its version. Autograd leaves it to hooks to check that it was not
# changed since: a detached one shares the version counter of its original, also without values.
_Kept = tuple[torch.Tensor, int]


class SavedTensor:
    """A tensor kept as it is, or parked. It must not be changed."""

    __slots__ = ("_detached", "_parked", "_shape", "_version")

    def __init__(self, tensor: torch.Tensor, parked: KeptTensor | None) -> None:
        # not the tensor itself: an output keeps the node that would keep it
        self._detached = tensor.detach()
        self._version = tensor._version
        self._shape = tensor.shape
        self._parked = parked
        if parked is not None:
            forget_values(self._detached)

    @property
    def changed(self) -> bool:
        return self._detached._version != self._version

    def tensor(self) -> torch.Tensor:
        if self.changed:
            _refuse(self._detached, self._version, f"a tensor of shape {tuple(self._shape)}")
        return self._detached if self._parked is None else self._parked.tensor()


def _refuse(counter: torch.Tensor, saved: int, what: str) -> NoReturn:
    raise ModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} is at version {counter._version}, expected version {saved}; make "
        "the change before the forward or after the backward, or compute with a copy"
    )


class HandleTable:
    """Knows gathered buffers by address and makes handles from views of them."""

    def __init__(self, use: Callable[[ParamGroup], None], keeper: Keeper | None = None) -> None:
        self._use = use  # told before a group is needed again, so that it can fetch ahead
        self._keeper = keeper
        self._buffers: dict[int, ParamGroup] = {}  # storage address -> group
        self._experts = 0  # being computed, one within another

    def note(self, group: ParamGroup) -> None:
        """Note that `group` was gathered: views of its buffer become handles from now on."""
        for param in group.params:
            local = local_of(param)
            if local.numel():
                self._buffers[local.untyped_storage().data_ptr()] = group
                return

    def forget_addresses(self) -> None:
        """Forget all buffers: other tensors may get their addresses."""
        self._buffers.clear()

    def group_of(self, tensor: torch.Tensor) -> ParamGroup | None:
        """Return the group whose buffer `tensor`, or a DTensor's local part, is a view of."""
        memory = tensor if type(tensor) is torch.Tensor else memory_of(tensor)
        if memory is None or memory.layout is not torch.strided or memory.is_meta:
            return None
        return self._buffers.get(memory.untyped_storage().data_ptr())

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context that packs views of buffers as handles, outside of any hooks set within
        it.

        Inside a checkpoint it does nothing: tensors saved there are recomputed, and the checkpoint
        compares both passes (but see `of_expert`).
        """
        outer = active_hooks()
        if is_checkpoint(outer):
            return nullcontext()

        group_of, keeper = self.group_of, self._keeper
        stays = outer is None and keeper is None

        @uncompiled
        def pack(tensor: torch.Tensor) -> Any:
            group = group_of(tensor)
            if group is not None:
                return _handle(group, tensor)
            if stays:
                return tensor.detach(), tensor._version
            return _pass_on(tensor, outer, keeper)

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def views(self) -> AbstractContextManager[Any]:
        """Return a context for recomputation in a backward pass: views of buffers stay views, and
        no tensor is parked, since backward needs them at once.

        A leaf is saved as the object itself, and a released parameter has no values: save the view
        that it is now.
        """
        outer = active_hooks()

        def pack(tensor: torch.Tensor) -> Any:
            # in this order: most tensors are no views of a buffer, and the other question is dear
            group = self.group_of(tensor)
            if group is not None and self._experts:
                return _handle(group, tensor)
            if group is not None and isinstance(tensor, torch.nn.Parameter):
                tensor = tensor.detach()
            return _pass_on(tensor, outer)

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    @contextmanager
    def of_expert(self) -> Iterator[None]:
        """Compute one expert inside, in both passes of a checkpoint: its matrices become handles,
        not tensors of the checkpoint, which would hold those of all experts of a block in memory at
        once, from its second pass until its backward is over."""
        outer = active_hooks()
        self._experts += 1
        try:
            with self.views() if is_checkpoint(outer) else nullcontext():
                yield
        finally:
            self._experts -= 1

    @uncompiled
    def _unpack(self, packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is tuple:
            kept: _Kept = packed
            tensor, version = kept
            if tensor._version != version:
                _refuse(tensor, version, f"a tensor of shape {tuple(tensor.shape)}")
            return tensor
        if kind is Handle:
            return self._view(packed)
        if kind is _Outer:
            outer: torch.Tensor = packed.unpack(packed.packed)
            return outer
        parked: torch.Tensor = packed.tensor()
        return parked

    @interrupted_in_waits
    def _view(self, handle: Handle) -> torch.Tensor:
        group = handle.group
        if handle.counter._version != handle.counted:
            _refuse(handle.counter, handle.counted, _name_of(handle))
        trainable = group.dtype is not handle.dtype or handle.offset < group.layout.numel_trainable
        if group.writes.updated_at > handle.version and trainable:
            raise StateError(
                f"backward needs the parameters of {group.name} as they were in the forward, but "
                "an optimizer step has changed them since; run backward before optimizer.step() "
                "(or set optimizer.in_backward: false, if that is on)"
            )
        if group.writes.version != handle.version and _was_written(handle):
            raise ModifiedError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {_name_of(handle)} was written (or its .data was set) after "
                "the forward; make the change before the forward or after the backward, or compute "
                "the forward within torch.no_grad() if no backward follows"
            )
        self._use(group)
        flat = group.flat()
        if group.dtype is not handle.dtype:
            flat = flat.view(handle.dtype)
        view = flat.as_strided(handle.shape, handle.stride, handle.offset)
        return view if handle.spec is None else rebuilt(view, handle.spec)


def is_checkpoint(hooks: Hooks | None) -> bool:
    """Return whether they are those of a `torch.utils.checkpoint`, which saves nothing."""
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def _pass_on(tensor: torch.Tensor, outer: Hooks | None, keeper: Keeper | None = None) -> Any:
    if outer is not None:
        return _Outer(outer[1], outer[0](tensor))
    parked = None if keeper is None else keeper.keep(tensor)
    # not the tensor itself: an output keeps the node that would keep it
    return (tensor.detach(), tensor._version) if parked is None else SavedTensor(tensor, parked)


def _handle(group: ParamGroup, tensor: torch.Tensor) -> Handle:
    spec = tensor._spec if is_dtensor(tensor) else None
    view = tensor if spec is None else local_of(tensor)
    counter = tensor.detach()
    forget_values(counter)
    return Handle(
        group, group.writes.version, view.dtype, view.shape, view.stride(),
        int(view.storage_offset()), counter, tensor._version, spec,
    )  # fmt: skip


def _was_written(handle: Handle) -> bool:
    """Return whether a user wrote to the parameter of a handle. If it is unknown which one was
    saved, any parameter of the group counts."""
    written = handle.group.writes.written_at
    indices = [index for index, _ in _params_of(handle)] or list(written)
    return any(written.get(index, 0) > handle.version for index in indices)


def _name_of(handle: Handle) -> str:
    """Return the name of a handle's parameter; the group's, if no parameter has its dtype."""
    name = next((name for _, name in _params_of(handle)), handle.group.name)
    return f"{name}, saved in shape {tuple(handle.shape)},"


def _params_of(handle: Handle) -> Iterator[tuple[int, str]]:
    """Yield number and name of the parameter that a handle is a view of."""
    group = handle.group
    for index, spec in enumerate(group.layout.params):
        if group.dtype is handle.dtype and spec.offset <= handle.offset < spec.stop:
            yield index, spec.name


def in_backward() -> bool:
    """Return whether autograd has called the running code."""
    return torch._C._current_graph_task_id() != -1


@defer_signals
def leave_checkpoints(error: BaseException) -> None:
    """End the contexts of checkpoints that `error` has come through, the innermost first.

    Before torch 2.13 a checkpoint leaves that to the collection of its generator: its hooks, and
    those below them, would be active as long as the error is referenced, and be taken off twice if
    an interrupt took them off before.
    """
    frames, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _CHECKPOINT:
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    for value in chain.from_iterable(frame.f_locals.values() for frame in reversed(frames)):
        if isgenerator(value):
            value.close()


class Session:
    """The saved-tensor hooks of one session: saved tensors become handles, from the outermost call
    of a unit to its return. For one thread.

    torch keeps these hooks on a stack and takes off the top one: after a KeyboardInterrupt the
    stack has to be checked.
    """

    def __init__(self, handles: HandleTable) -> None:
        self._outer = active_hooks()
        self._hooks = handles.views() if in_backward() else handles.hooks()
        self._is_open = False

    def open(self) -> None:
        self._hooks.__enter__()
        self._is_open = True

    def close(self) -> None:
        """Take off one of each: if other hooks are on top of these, their owner takes these off in
        turn."""
        if self._is_open:
            self._hooks.__exit__(None, None, None)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Take off what is left of `open`, `close` or anything within that was cut short."""
        take_off_hooks(self._outer)
