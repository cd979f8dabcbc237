"""Keeps torch.compile out of the hooks that move parameters, and out of all that they call.

`torch.compiler.disable` does the same, but imports the compiler at once, two seconds and 80 MiB
also for users who do not compile. These decorators wait until other code has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame as _eval_frame

_NEEDED = {"disable"}

# What PyTorch says of a graph that would have to include one of these functions.
_NO_GRAPH = (
    "parameters in tiers are fetched and released before and after blocks, so a model of several "
    "blocks cannot be one graph; leave fullgraph=True out, which compiles what is between, or "
    "compile each block (for block in model.model.layers: block.compile(fullgraph=True))"
)

# With what this thread compiles frames, if it does. Where PyTorch does not say, it might.
_compiler_of_frames: Callable[[], Any] = getattr(_eval_frame, "get_eval_frame_callback", object)
_RUN_AS_IT_IS = _eval_frame._FrameExecStrategy(
    _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
)
Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Let `function` and all that it calls run uncompiled; a graph in progress ends before it."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            compiler = sys.modules.get("torch._dynamo")
            # it may be half imported
            if compiler is None or not vars(compiler).keys() >= _NEEDED:
                return function(*args, **kwargs)
            disabled = compiler.disable(function)
        elif not is_active():  # nothing to switch off, which would take longer
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return break_graph(call)  # type: ignore[return-value]


def break_graph(function: Function) -> Function:
    """`function` is part of no graph; the functions it calls may be compiled separately."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _NO_GRAPH
    # called by what is not compiled it would be one by itself, anew for every object that has it
    _eval_frame.set_code_exec_strategy(marked.__code__, _RUN_AS_IT_IS)
    return function


@break_graph
def is_active() -> bool:
    """Return whether code on this thread may be compiled."""
    return _compiler_of_frames() is not None
