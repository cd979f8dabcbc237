"""The program of a step: its actions on each group, in order.

    forward    update(0) use(0) update(1) use(1) ...      updates of the step before, each in time
    backward   ... use(1) gradient(1) use(0) gradient(0)  with `in_backward`: update(1) update(0)

Groups are used in module order, and in backward in the reverse of it. A module in front of the
blocks that has one matrix (an embedding, or any layer whose input needs no gradient) is not needed
again in backward. Where nothing is trained there is no backward: a step is a pass of inference.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.zero.groups.model_shape import ModelShape, UnitShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


class Verb(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"  # the last gradient of a group in this pass is there
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a group. `position` is the number of earlier uses in the step."""

    verb: Verb
    group: int
    position: int
    number: int = 0  # of the pass


@dataclass(slots=True)
class Bytes:
    """The bytes over each link, the requests to nvme, and the bytes decoded for computing."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    to_host: int = 0
    requests: int = 0
    decoded: int = 0

    def from_nvme(self, nbytes: int, requests: int) -> None:
        self.read += nbytes
        self.requests += requests

    def to_nvme(self, nbytes: int, requests: int) -> None:
        self.written += nbytes
        self.requests += requests

    def add(self, other: Bytes) -> None:
        self.read += other.read
        self.written += other.written
        self.to_device += other.to_device
        self.to_host += other.to_host
        self.requests += other.requests
        self.decoded += other.decoded


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parameters that an action requests, for its own group or ahead."""

    group: int
    read_nbytes: int
    to_device_nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """An action with all bytes that it moves; `fetches` has those of parameters by group."""

    action: Action
    nbytes: Bytes
    fetches: tuple[Fetch, ...] = ()


@dataclass(frozen=True)
class StepProgram:
    """The actions of a step, and the uses (groups, in order) that the runtime's trace learns."""

    actions: tuple[Action, ...]
    uses: tuple[int, ...]


def write_program(
    config: OffloadConfig, model: ModelShape, passes: int, tried: Collection[int] = (), *,
    begins: bool = False,
) -> StepProgram:  # fmt: skip
    """Write the program of a step of `passes` backward passes. Groups in `tried` are updated during
    backward if their gradients are complete there; with `begins` none were in the step before, so
    that its updates are made in this one's forward.

    Updates during the next forward are made just before their group is needed, as happens when they
    take longer than the forward.
    """
    forward = _forward_uses(model)
    backward = _backward_uses(model) if model.numel_trainable else {}
    ends = _gradient_ends(model)
    used = dict.fromkeys(forward)
    trained = {index for index in used if model.groups[index].layout.numel_trainable}
    ahead = trained if config.optimizer.in_backward is True else trained & set(tried)
    behind = sorted(trained if begins else trained - ahead, key=_rank(forward, len(trained)))
    uses: list[int] = []
    actions: list[Action] = []
    for number in range(passes):
        pending = dict.fromkeys(behind if number == 0 else ())
        for group in forward:
            while group in pending:
                earliest = next(iter(pending))
                del pending[earliest]
                actions.append(Action(Verb.UPDATE, earliest, len(uses), number))
            actions.append(Action(Verb.FORWARD, group, len(uses), number))
            _note(uses, group)
        actions += [Action(Verb.UPDATE, group, len(uses), number) for group in pending]
        done: set[int] = set()
        waiting: list[int] = []  # updates with in_backward, while the next gradients come
        for unit in range(len(model.units) - 1, -1, -1):
            for group in backward.get(unit, ()):
                actions.append(Action(Verb.BACKWARD, group, len(uses), number))
                _note(uses, group)
            for group in ends.get(unit, ()):
                if group in trained and group not in done:
                    done.add(group)
                    actions.append(Action(Verb.GRADIENT, group, len(uses), number))
                    begins_now = [group] if group in ahead and number == passes - 1 else []
                    made, waiting = waiting, begins_now
                    if group in tried:
                        made, waiting = begins_now, []
                    actions += [Action(Verb.UPDATE, g, len(uses), number) for g in made]
        actions += [Action(Verb.UPDATE, group, len(uses), number) for group in waiting]
    return StepProgram(tuple(actions), tuple(uses))


def working_groups(model: ModelShape) -> frozenset[int]:
    """The groups whose use is work: those that backward needs, if there is one. A table that is
    only looked up is not among them."""
    return frozenset(group for groups in _backward_uses(model).values() for group in groups)


def pieces_of(config: OffloadConfig, batch: int) -> int:
    """The number of pieces in which a block of a dispatched model computes a batch."""
    return config.micro_batches if batch >= config.micro_batches else 1


def _rank(forward: list[int], otherwise: int) -> Callable[[int], int]:
    order = {group: rank for rank, group in reversed(list(enumerate(forward)))}
    return lambda group: order.get(group, otherwise)


def _note(uses: list[int], group: int) -> None:
    """Append a use; repeated uses in a row count once."""
    if not uses or uses[-1] != group:
        uses.append(group)


def _forward_uses(model: ModelShape) -> list[int]:
    return [group for unit in model.units for group in unit.groups]


def _backward_uses(model: ModelShape) -> dict[int, list[int]]:
    """The groups that backward needs, by unit."""
    found: dict[int, list[int]] = {}
    before_blocks = True
    for index, unit in enumerate(model.units):
        before_blocks = before_blocks and not unit.repeated
        if not (before_blocks and _is_one_matrix(model, unit)):
            found[index] = list(reversed(unit.groups))
    return found


def _is_one_matrix(model: ModelShape, unit: UnitShape) -> bool:
    """Whether the unit is one matrix, which backward would need only for its input's gradient."""
    own = [param for group in unit.groups for param in model.groups[group].params]
    return len(own) == 1 and len(own[0].shape) == 2


def _gradient_ends(model: ModelShape) -> dict[int, list[int]]:
    """The groups by the unit whose backward ends their gradients, the first to use them."""
    first: dict[int, int] = {}
    for index, unit in enumerate(model.units):
        for group in unit.groups:
            first.setdefault(group, index)
    ends: dict[int, list[int]] = {}
    for group, index in first.items():
        ends.setdefault(index, []).append(group)
    return ends
