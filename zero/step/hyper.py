"""Hyperparameters of a step: as the user sets them per parameter, and as kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from offload.kernels.rules import Scalars

Number = float | bool


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter's hyperparameters in one step (from its param group), for one kind of
    optimizer."""

    kind: type[Scalars]
    numbers: tuple[tuple[str, Number], ...]  # the kind's fields that do not change with the step

    def scalars(self, step: int, grad_scale: float) -> Scalars:
        """Return the kernels' numbers for update number `step` of a parameter, from 1."""
        return self.kind.at(step, grad_scale, dict(self.numbers))


# The hyperparameters of a parameter; None if it is in no param group.
HyperOf = Callable[[nn.Parameter], Hyper | None]
