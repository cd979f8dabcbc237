"""A session: torch sees parameters our way, from the outermost call of a unit to its return.

Saved tensors become handles, and parameters used outside of their own module's forward are gathered
when a torch function gets them. Both are torch's own stacks, from which one takes off what is on
top: who is cut short by a KeyboardInterrupt has to look at what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from offload.zero.handles import HandleTable, active_hooks, take_off_hooks

# Reading these of a parameter needs no values.
_METADATA = frozenset(
    {
        "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size",
        "ndimension", "nelement", "requires_grad_", "data_ptr", "is_contiguous", "__len__",
        "register_hook", "register_post_accumulate_grad_hook", "storage_offset", "is_same_size",
        "__hash__", "__repr__", "__deepcopy__", "get_device", "type",
    }
)  # fmt: skip
_VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


def in_backward() -> bool:
    """Whether autograd has called what is running."""
    return torch._C._current_graph_task_id() != -1


class Session:
    """Our saved-tensor hooks and function mode. For one thread."""

    def __init__(
        self, handles: HandleTable, gather_strays: Callable[[Iterable[Any]], None] | None
    ) -> None:
        self._outer = active_hooks()
        self._hooks = handles.views() if in_backward() else handles.hooks()
        self._mode = None if gather_strays is None else _StrayMode(gather_strays)
        self._is_open = False

    def open(self) -> None:
        take_off_dead_modes()
        self._hooks.__enter__()
        if self._mode is not None:
            self._mode.__enter__()
        self._is_open = True

    def close(self) -> None:
        """Take off one of each: whose hooks are on top of ours takes ours off in turn."""
        if self._is_open:
            if self._mode is not None:
                self._mode.__exit__(None, None, None)
                self._mode.dead = True
            self._hooks.__exit__(None, None, None)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Take off what is left of `open`, `close` or anything within that was cut short."""
        if self._mode is not None:
            self._mode.dead = True
        take_off_dead_modes()
        take_off_hooks(self._outer)


def take_off_dead_modes() -> None:
    """Of any session. An interrupt amid a torch function brings the mode back when its traceback
    goes: torch takes the mode off while the function runs, in a generator."""
    modes = _get_current_function_mode_stack()
    living = [mode for mode in modes if not (isinstance(mode, _StrayMode) and mode.dead)]
    if len(living) < len(modes):
        for _ in modes:
            _pop_mode()
        for mode in living:
            _push_mode(mode)


class _StrayMode(TorchFunctionMode):
    """Shows every torch function's arguments to `gather` before the function runs."""

    def __init__(self, gather: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._gather = gather
        self.dead = False  # its session is over

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.dead and _reads_values(func):
            self._gather(args)
            if kwargs:
                self._gather(kwargs.values())
        return func(*args, **kwargs)


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VALUE_PROPERTIES  # type: ignore[attr-defined]
    return name not in _METADATA and name != "__set__"
