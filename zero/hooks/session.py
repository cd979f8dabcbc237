"""A session: saved tensors become handles, from the outermost call of a unit to its return.

torch keeps these hooks on a stack and takes off the top one: after a KeyboardInterrupt the stack
has to be checked.
"""

from __future__ import annotations

from inspect import isgenerator, unwrap
from itertools import chain

import torch
import torch.utils.checkpoint

from offload.swap.threads.shield import defer_signals
from offload.zero.hooks.handles import HandleTable, active_hooks, take_off_hooks

_CHECKPOINT = unwrap(torch.utils.checkpoint.checkpoint).__code__


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
    """The saved-tensor hooks of one session. For one thread."""

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
