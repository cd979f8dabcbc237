"""The program of a step: its actions on each group, in order.

    forward    update(0) use(0) update(1) use(1) ...      updates of the step before, each in time
    backward   ... use(1) gradient(1) use(0) gradient(0)  with `in_backward`: update(1) update(0)

Groups are used in module order, and in backward in the reverse of it. A module in front of the
blocks that has one matrix (an embedding, or any layer whose input needs no gradient) is not needed
again in backward. Where nothing is trained there is no backward: a step is a pass of inference.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


class Verb(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"  # the last gradient of a group in this pass is there
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a group."""

    verb: Verb
    group: int
    number: int = 0  # of the pass


@dataclass(slots=True)
class Bytes:
    """The bytes over each link, and those dequantized for computing."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    to_host: int = 0
    dequantized: int = 0

    def add(self, other: Bytes) -> None:
        for link in fields(other):
            setattr(self, link.name, getattr(self, link.name) + getattr(other, link.name))

    def part(self, index: int, count: int) -> Bytes:
        """Part `index` of `count` whole parts that add up."""
        return Bytes(*(n * (index + 1) // count - n * index // count for n in astuple(self)))


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


def total_of(moves: Iterable[Move]) -> Bytes:
    total = Bytes()
    for move in moves:
        total.add(move.nbytes)
    return total


def write_program(
    config: OffloadConfig, model: ModelShape, passes: int, speculative: Collection[int] = (), *,
    begins: bool = False,
) -> list[Action]:  # fmt: skip
    """Write the program of a step of `passes` backward passes. Groups in `speculative` are updated
    during backward if their gradients are complete there; with `begins` none were in the step
    before, so that its updates are made in this one's forward.

    Updates during the next forward are made just before their group is needed, as happens when they
    take longer than the forward.
    """
    first: dict[int, int] = {}  # the unit that uses a group first: its backward ends the gradients
    for index, unit in enumerate(model.units):
        for group in unit.groups:
            first.setdefault(group, index)
    backward = _backward_uses(model) if model.numel_trainable else {}
    trained = {group: None for group in first if model.groups[group].layout.numel_trainable}
    always = config.optimizer.in_backward is True
    ahead = {group for group in trained if always or group in speculative}
    behind = [group for group in trained if begins or group not in ahead]
    actions: list[Action] = []
    for number in range(passes):
        pending = dict.fromkeys(behind if number == 0 else ())
        for group in (group for unit in model.units for group in unit.groups):
            while group in pending:
                earliest = next(iter(pending))
                del pending[earliest]
                actions.append(Action(Verb.UPDATE, earliest, number))
            actions.append(Action(Verb.FORWARD, group, number))
        waiting: list[Action] = []  # updates with in_backward, while the next gradients come
        for index in reversed(range(len(model.units))):
            actions += [Action(Verb.BACKWARD, group, number) for group in backward.get(index, ())]
            for group in model.units[index].groups:
                if first[group] != index or group not in trained:
                    continue
                actions += [Action(Verb.GRADIENT, group, number), *waiting]
                is_complete = group in ahead and number == passes - 1
                waiting = [Action(Verb.UPDATE, group, number)] if is_complete else []
                if group in speculative:
                    actions += waiting
                    waiting = []
        actions += waiting
    return actions


def working_groups(model: ModelShape) -> frozenset[int]:
    """The groups whose use is work: those that backward needs, if there is one. A table that is
    only looked up is not among them."""
    return frozenset(group for groups in _backward_uses(model).values() for group in groups)


def _backward_uses(model: ModelShape) -> dict[int, list[int]]:
    """The groups that backward needs, by unit."""
    uses: dict[int, list[int]] = {}
    before_blocks = True
    for index, unit in enumerate(model.units):
        before_blocks = before_blocks and not unit.repeated
        own = [param for group in unit.groups for param in model.groups[group].params]
        # one matrix is needed for its input's gradient alone
        if not (before_blocks and len(own) == 1 and len(own[0].shape) == 2):
            uses[index] = list(reversed(unit.groups))
    return uses
