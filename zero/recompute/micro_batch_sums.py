"""Gradients of one block summed over its micro-batches, where they are computed.

A large batch's gradient is one product, accumulated in fp32 and rounded once. So are these: fp32
sums in the order of arrival, rounded to the parameters' format when they are handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec


class GradientSums:
    """Sums for one block at a time. `buffer` is fp32, 1D, on the device that computes; the groups
    of a block follow each other in it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._starts: dict[int, int] = {}  # group -> where it begins in the buffer
        self._came: set[tuple[int, int]] = set()  # (group, parameter) with a gradient

    @contextmanager
    def open(self, groups: Sequence[ParamGroup]) -> Iterator[None]:
        """While inside, `add` takes gradients of `groups`; `totals` has them until the next one."""
        assert not self._starts, "one block at a time"
        self._came.clear()
        start = 0
        for group in groups:
            self._starts[group.index] = start
            start += group.layout.numel_trainable
        try:
            yield
        finally:
            self._starts.clear()

    def takes(self, group: ParamGroup) -> bool:
        return group.index in self._starts

    def add(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of a group's parameter `index` (any float dtype)."""
        target = self._view(group, group.layout.params[index])
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if (group.index, index) in self._came:
            target.add_(gradient)  # widened to fp32 first, exactly
        else:
            target.copy_(gradient)
        self._came.add((group.index, index))

    def totals(self, group: ParamGroup) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter of the group that got gradients, by index, and their sum (a
        view)."""
        for index, spec in enumerate(group.layout.params):
            if (group.index, index) in self._came:
                yield index, self._view(group, spec)

    def _view(self, group: ParamGroup, spec: ParamSpec) -> torch.Tensor:
        start = self._starts[group.index] + spec.offset
        return self._buffer[start : start + spec.numel].view(spec.shape)
