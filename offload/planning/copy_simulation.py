"""A run of the runtime's own rules over the copies in host memory, without bytes: see `copies`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offload.planning.copy_totals import ONE_LATE, Copies, Run
from offload.planning.plan import Plan, spare_host_nbytes
from offload.swap.trace import Trace
from offload.tiers.arena import Arena
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.zero.model_shape import ModelShape, UnitShape

STEPS = 3  # the first one learns the trace, the second one brings ahead by it


@dataclass(eq=False, slots=True)
class _Piece:
    """A state at home on nvme."""

    group: int
    state_class: StateClass
    nbytes: int
    order: str  # as names are compared where nothing else decides
    offset: int | None = None  # of its copy
    dirty: bool = False  # used up soon: not written


@dataclass
class _Group:
    parameters: _Piece | None
    gradients: _Piece | None
    records: list[_Piece | None]


@dataclass
class _Peak:
    nbytes: int = 0
    by_class: dict[StateClass, int] = field(default_factory=dict)


class Simulation:
    """One run. Uses of groups come from the units in module order."""

    def __init__(self, plan: Plan, model: ModelShape, run: Run, room_nbytes: int) -> None:
        self._plan = plan
        self._run = run
        self._arena = Arena(max(0, room_nbytes))
        self._trace = Trace()
        self._units = model.units
        self._needed: int | None = None
        self._in_use: dict[int, int] = {}
        self._held: dict[_Piece, None] = {}
        self._used: dict[StateClass, int] = {}
        self._peak = _Peak()
        self._keeps = spare_host_nbytes(plan) > 0
        self._staged = False
        self._groups = [self._group(index) for index in range(len(plan.groups))]
        self._owner = _owners(model.units)

    def _group(self, index: int) -> _Group:
        plan, group = self._plan, self._plan.groups[index]

        def piece(tier: TierName, kind: StateClass, nbytes: int, name: str) -> _Piece | None:
            if tier is not TierName.NVME:
                return None
            return _Piece(index, kind, nbytes, f"{group.name} {name}")

        gradients = None
        if not self._run.sums:
            gradients = piece(
                plan.gradients[index], StateClass.GRADIENTS, group.gradients, "gradients"
            )
        return _Group(
            piece(plan.parameters[index], StateClass.PARAMETERS, group.parameters, "parameters"),
            gradients,
            [
                piece(tier, StateClass.OPTIMIZER, nbytes, f"optimizer chunk {number}")
                for number, (tier, nbytes) in enumerate(
                    zip(plan.records[index], group.records, strict=True)
                )
            ],
        )

    # ---------------------------------------------------------------- the run
    def run(self) -> None:
        for group in self._groups:
            self._load(group)
        for _ in range(STEPS):
            for number in range(self._run.passes):
                self._trace.begin_forward()
                self._forward()
                self._backward(last=number == self._run.passes - 1)
            self._trace.end_cycle()

    def found(self) -> Copies:
        return Copies(self._peak.by_class, self._arena.high_water_nbytes, self._staged)

    def _load(self, group: _Group) -> None:
        if group.parameters is not None:
            self._demand(group.parameters)
            self._enter(group.parameters.group)
        for record in group.records:
            if record is not None:
                self._demand(record)
        if group.parameters is not None:
            self._leave(group.parameters.group)

    def _forward(self) -> None:
        for unit in _calls(self._units):
            if isinstance(unit, _End):
                for index in unit.groups:
                    self._leave(index)
            else:
                for index in unit.groups:
                    self._use(index, backward=False)
                    self._enter(index)

    def _backward(self, *, last: bool) -> None:
        waiting: deque[int] = deque()
        for number, unit in reversed(list(enumerate(self._units))):
            if number:  # what reads the input of the model saves none of its parameters
                for index in unit.groups:
                    self._use(index, backward=True)
                    self._enter(index)
            for index in self._owner[number]:
                self._take_gradients(self._groups[index], last=last)
                if last and self._run.in_backward:
                    waiting.append(index)
                    if len(waiting) > ONE_LATE:
                        ready = waiting.popleft()
                        self._update(self._groups[ready], ready)
            if number:
                for index in unit.groups:
                    self._leave(index)
        if not last:
            return
        order = list(waiting) if self._run.in_backward else self._trace.first_uses()
        for index in order:
            self._update(self._groups[index], index)

    def _use(self, index: int, *, backward: bool) -> None:
        self._needed = index
        self._trace.use(index, backward=backward)
        parameters = self._groups[index].parameters
        if parameters is not None:
            self._offer(parameters, 0)
        if self._plan.prefetch and self._trace.learnt:
            self._fetch_ahead()
        if parameters is not None:
            self._demand(parameters)

    def _fetch_ahead(self) -> None:
        for distance, index in enumerate(self._trace.upcoming()):
            if distance >= self._plan.prefetch:
                return
            parameters = self._groups[index].parameters
            if parameters is not None and not self._offer(parameters, self._trace.next_use(index)):
                return

    def _take_gradients(self, group: _Group, *, last: bool) -> None:
        if group.gradients is None:
            return
        self._demand(group.gradients)
        group.gradients.dirty = last and self._run.in_backward

    def _update(self, group: _Group, index: int) -> None:
        parameters, gradients = group.parameters, group.gradients
        if parameters is not None:
            self._offer(parameters, self._trace.next_use(index))
        for record in group.records:
            if record is not None and self._keeps:
                self._offer(record, self._next_use(record))
            parts = (parameters, record, gradients)
            self._staged |= any(part is not None and part.offset is None for part in parts)
        if gradients is not None:
            self._give_back(gradients)

    def _give_back(self, gradients: _Piece) -> None:
        gradients.dirty = False
        if gradients.offset is not None:
            self._drop(gradients)

    # ---------------------------------------------------------------- host memory
    def _next_use(self, piece: _Piece) -> float:
        if piece.state_class is StateClass.PARAMETERS:
            return 0.0 if piece.group == self._needed else self._trace.next_use(piece.group)
        return self._trace.next_cycle_use(piece.group) + 0.5

    def _demand(self, piece: _Piece) -> None:
        self._take(piece, math.inf)

    def _offer(self, piece: _Piece, next_use: float) -> bool:
        return self._take(piece, next_use)

    def _take(self, piece: _Piece, before: float) -> bool:
        """Give `piece` a copy; those used before `before` (inf: a demand) are not given up."""
        if piece.offset is not None or self._lease(piece):
            return True
        for other in self._furthest_first(before):
            self._drop(other)
            if self._lease(piece):
                return True
        return False

    def _furthest_first(self, before: float) -> list[_Piece]:
        found = []
        for piece in self._held:
            gathered = piece.state_class is StateClass.PARAMETERS and piece.group in self._in_use
            if piece.dirty or gathered:
                continue
            next_use = self._next_use(piece)
            if before == math.inf or next_use > before:
                found.append((-next_use, -piece.nbytes, piece.order, piece))
        return [entry[3] for entry in sorted(found, key=lambda entry: entry[:3])]

    def _lease(self, piece: _Piece) -> bool:
        piece.offset = self._arena.allocate(piece.nbytes)
        if piece.offset is None:
            return False
        self._held[piece] = None
        used = self._used
        used[piece.state_class] = used.get(piece.state_class, 0) + piece.nbytes
        if self._arena.used_nbytes > self._peak.nbytes:
            self._peak = _Peak(self._arena.used_nbytes, dict(used))
        return True

    def _drop(self, piece: _Piece) -> None:
        assert piece.offset is not None, "only copies are dropped"
        self._arena.free(piece.offset)
        piece.offset = None
        del self._held[piece]
        self._used[piece.state_class] -= piece.nbytes

    def _enter(self, index: int) -> None:
        self._in_use[index] = self._in_use.get(index, 0) + 1

    def _leave(self, index: int) -> None:
        self._in_use[index] -= 1
        if not self._in_use[index]:
            del self._in_use[index]


@dataclass(frozen=True)
class _End:
    """Of a unit's call."""

    groups: tuple[int, ...]


def _calls(units: Sequence[UnitShape]) -> Iterator[UnitShape | _End]:
    """Units as they are entered and left in a forward: one lies within another by its name."""
    open_units: list[UnitShape] = []
    for unit in units:
        while open_units and not _within(unit.name, open_units[-1].name):
            yield _End(open_units.pop().groups)
        open_units.append(unit)
        yield unit
    while open_units:
        yield _End(open_units.pop().groups)


def _within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _owners(units: Sequence[UnitShape]) -> list[list[int]]:
    """Per unit the groups whose gradients are complete once backward has gone through it: those
    that no unit before it uses."""
    seen: set[int] = set()
    owners = []
    for unit in units:
        owners.append([index for index in unit.groups if index not in seen])
        seen.update(unit.groups)
    return owners
