"""Ctrl-C at every place where Python can raise it: a training loop that goes on afterwards.

Python looks for signals where a function begins and where a call of C returns (and in loops): the
very places that a profile function is told of. `at_point(n)` interrupts at the n-th of them;
`after_us(n)` by a timer, wherever the program is by then.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

import offload


@contextmanager
def counted_points() -> Iterator[Callable[[], int]]:
    """How many points the block has (on this thread), once it has ended."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_return")

    sys.setprofile(profile)
    try:
        yield lambda: count
    finally:
        sys.setprofile(None)


@contextmanager
def at_point(number: int) -> Iterator[None]:
    """A Ctrl-C at the `number`-th point of the block."""
    left = number

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def after_us(delay_us: int) -> Iterator[None]:
    """A Ctrl-C after so many microseconds in the block."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, delay_us * 1e-6)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def assert_at_rest(engine: offload.Engine) -> None:
    assert _get_current_function_mode_stack() == []
    assert torch._C._len_torch_dispatch_stack() == 0
    assert saved_tensor_hooks() is None
    assert not any(group.is_entered for group in engine.store.groups)
    assert torch.is_grad_enabled()
    assert threading.active_count() < 100


class Interrupted:
    """A loop that catches Ctrl-C and goes on: it repeats a step that has not been decided."""

    def __init__(self, engine: offload.Engine) -> None:
        self.engine = engine
        self.losses: list[float] = []
        self.interrupts = self.repeated = 0

    def step(self, tokens: torch.Tensor, parts: int = 1) -> float:
        """One step as people write it."""
        engine, total = self.engine, 0.0
        for part in tokens.chunk(parts):
            loss = engine.module.loss(part)  # type: ignore[operator]
            engine.backward(loss / parts)
            total += loss.item()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return total

    def interrupted_step(self, tokens: torch.Tensor, interrupt: Any, parts: int = 1) -> None:
        """A step that `interrupt` (a context) may cut short, and what it takes to have made it."""
        taken = self.engine.report().steps
        try:
            with interrupt:
                loss = self.step(tokens, parts)
        except KeyboardInterrupt:
            self.interrupts += 1
            assert_at_rest(self.engine)
            self.engine.optimizer.zero_grad()
            if self.engine.report().steps == taken:
                self.repeated += 1
                loss = self.step(tokens, parts)
            else:
                loss = float("nan")  # it counts; what it said is lost
        self.losses.append(loss)


def same_losses(actual: Sequence[float], expected: Sequence[float]) -> bool:
    """Equal wherever a loss is known."""
    return all(a == b or a != a for a, b in zip(actual, expected, strict=True))
