"""The gradients, hyperparameters and optimizer records of one group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from offload.kernels.floats import Array
from offload.kernels.rules import Scalars
from offload.swap.states.state import State
from offload.zero.groups.group import ParamGroup, Update
from offload.zero.ranks.reduction import Gradients
from offload.zero.ranks.sharding import Part, PartOfParam
from offload.zero.step.records import RecordFormat

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


@dataclass(slots=True)
class OptimizerState:
    """The optimizer records of one group: one per chunk of its trainable part, or of this rank's
    part of that. Chunks count elements from the first one of the part."""

    group: ParamGroup
    gradients: Gradients
    chunks: list[range]
    records: list[State]
    record_format: RecordFormat
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

    def count_update(self, indices: Sequence[int], update: Update) -> None:
        """Count one more update of these parameters."""
        self.steps[list(indices)] += 1
        self.group.invalidate(update)
