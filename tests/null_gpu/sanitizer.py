"""torch's CUDA sanitizer (`TORCH_CUDA_SANITIZER=1`), without its false reports of races.

Its variable would have it from the start, and end the program by an exception in the middle of a
call. Here it is on for a part of a program, and what it finds is listed. Two things it gets wrong:

    set_         puts a tensor over memory and touches none of it; the sanitizer calls that a write
    query        an event that is done orders what comes after it, as waiting for it does; the
                 sanitizer does not look at queries
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NO_ACCESS = (torch.ops.aten.set_,)


class _Watching(TorchDispatchMode):
    """Shows each operation to the sanitizer but those that access nothing."""

    def __init__(self, shown_to: TorchDispatchMode) -> None:
        super().__init__()
        self._shown_to = shown_to

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in _NO_ACCESS:
            return func(*args, **(kwargs or {}))
        return self._shown_to.__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def sanitized() -> Iterator[list[str]]:
    """Watch what this thread and its backward passes do on CUDA devices inside; yields the races
    found so far, each as a line."""
    import torch.cuda._sanitizer as sanitizer  # it follows streams and events from here on

    found: list[str] = []
    mode = sanitizer.cuda_sanitizer.dispatch
    handler: Any = mode.event_handler
    event: Any = torch.cuda.Event
    launched, query = handler._handle_kernel_launch, event.query

    def launch(*arguments: Any) -> list[Any]:
        found.extend(_line(error) for error in launched(*arguments))
        return []  # else it would raise

    def ask(self: Any) -> bool:
        done: bool = query(self)
        if done:
            handler._handle_event_synchronization(self.cuda_event)
        return done

    handler._handle_kernel_launch, event.query = launch, ask
    try:
        with _Watching(mode):
            yield found
    finally:
        handler._handle_kernel_launch, event.query = launched, query


def _line(race: Any) -> str:
    """Both accesses as a line: operator, kind, stream, and the place of our code that made them."""
    accesses = (race.current_access, race.previous_access)
    return ", and ".join(
        f"{access.operator.name} {access.type} it in stream {access.stream} at {_place(access)}"
        for access in accesses
    )


def _place(access: Any) -> str:
    """The innermost frame that is neither in PyTorch nor in this file."""
    others = (Path(torch.__file__).parent, Path(__file__))
    frames = [(Path(frame.filename), frame.lineno) for frame in access.stack_trace]
    ours = [(file, line) for file, line in frames if not {file, *file.parents} & {*others}]
    file, line = ours[-1] if ours else frames[-1]
    return f"{file.parent.name}/{file.name}:{line}"
