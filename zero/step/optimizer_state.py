"""The gradients, hyperparameters and optimizer records of one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import nn

from offload.kernels.floats import Array, Float
from offload.kernels.rules import Scalars
from offload.swap.states.state import State
from offload.swap.threads.transfer import Transfer
from offload.zero.groups.group import ParamGroup
from offload.zero.ranks.sharding import Part, PartOfParam
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    import torch


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


class Gradients(Protocol):
    """One group's gradients, of the part that this rank updates."""

    name: str
    passes: Array  # int64, per trainable parameter: > 0 where there is a gradient
    landed: Transfer[None]  # all that was taken in is in `state`, and that is on its way home

    @property
    def state(self) -> State: ...

    @property
    def format(self) -> Float: ...

    @property
    def has_any(self) -> bool: ...

    @property
    def is_reduced_locally(self) -> bool:
        """Whether the gradients arrive without waiting for other ranks."""
        ...

    @property
    def holds_any(self) -> bool:
        """Whether there are gradients to clear."""
        ...

    def add(self, index: int, gradient: torch.Tensor) -> bool:
        """Take in a gradient of parameter `index`. Returns False if the update must not count on it
        before the step."""
        ...

    def read(self, index: int) -> torch.Tensor | None:
        """Return a copy of this rank's part of a gradient; None if it has none."""
        ...

    def close(self) -> bool:
        """Let what arrived go home. Returns False if there is nothing to let go."""
        ...

    def square(self, index: int) -> float:
        """Return the sum of squares of the gradient that this rank updates a parameter with;
        infinite or NaN if that is."""
        ...

    @property
    def spent(self) -> bool:
        """Whether an update has used the gradients up."""
        ...

    def write(self, index: int, value: torch.Tensor) -> None:
        """Let `value`, of the whole parameter's size, be its gradient."""
        ...

    def scale(self, index: int, factor: float) -> None:
        """Multiply a parameter's gradient."""
        ...

    def factor(self, index: int) -> float:
        """Return the factor that an update has to multiply the values in `state` by."""
        ...

    def drop(self, indices: Sequence[int]) -> None:
        """Forget the gradients of some parameters."""
        ...

    def spend(self) -> None:
        """Give the memory back: an update has used the gradients up. Their norm is still known."""
        ...

    def clear(self) -> None:
        """Forget all gradients."""
        ...


@dataclass(slots=True, weakref_slot=True)
class OptimizerState:
    """The optimizer records of one group: one per chunk of its trainable part, or of this rank's
    part of that. Chunks count elements from the first one of the part."""

    group: ParamGroup
    gradients: Gradients
    chunks: list[range]
    records: list[State]
    formats: list[RecordFormat]  # of the records
    steps: Array  # int64, per trainable parameter: how often it was updated
    part: Part  # of the group that this rank updates
    parts: dict[int, PartOfParam] = field(init=False)  # of parameters that lie in the part

    def __post_init__(self) -> None:
        self.parts = {part.index: part for part in self.part.trained()}

    @property
    def nbytes(self) -> int:
        """The bytes of the group's parameters and the optimizer's records, without gradients."""
        return self.group.state.nbytes + sum(record.nbytes for record in self.records)

    @property
    def in_place(self) -> bool:
        """Whether nothing of this group ever moves."""
        states = (self.group.state, self.gradients.state, *self.records)
        return all(state.in_place for state in states)
