"""A run of the runtime's own rules over the copies in host memory, without bytes: see `copies`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offload.planning.copy_totals import ONE_LATE, Copies, Run, nvme_totals
from offload.planning.plan import Plan, spare_host_nbytes
from offload.planning.plan_sizes import pages
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
    stored: bool = False  # it has a version on nvme


@dataclass
class _Group:
    parameters: _Piece | None
    gradients: _Piece | None
    records: list[_Piece | None]
    weights: list[int]  # of each chunk, bytes of parameters on disk


@dataclass(eq=False, slots=True)
class _Version:
    """What an updated chunk writes."""

    copies: dict[_Piece, int]  # bytes that leave from copies: nothing waits for them
    staged_nbytes: int  # ... and from a staging buffer
    staged: bool  # whether it has a staging buffer
    chunk: int = 0  # of its group


class _OnTheirWay:
    """Versions that may still be on their way to nvme, however slow writes are.

    The update takes back its staging buffers in their order: one that is used again was written,
    and so was all that was sent off before it. A chunk of a state has one write on its way.
    """

    def __init__(self, buffers: int) -> None:
        self._buffers = max(1, buffers)
        self._staged = 0  # of `_versions`
        self._versions: deque[_Version] = deque()
        self._latest: dict[tuple[_Piece, int], _Version] = {}
        self.copies_nbytes = self.staged_nbytes = 0

    def send(self, version: _Version) -> None:
        while version.staged and self._staged >= self._buffers:
            self._arrived(self._versions.popleft())
        for piece, nbytes in version.copies.items():
            key = (piece, version.chunk)
            before = self._latest.get(key)
            if before is not None:
                self.copies_nbytes -= before.copies.pop(piece, 0)
            self._latest[key] = version
            self.copies_nbytes += nbytes
        self._staged += version.staged
        self.staged_nbytes += version.staged_nbytes
        self._versions.append(version)

    def settle(self) -> None:
        while self._versions:
            self._arrived(self._versions.popleft())

    def _arrived(self, version: _Version) -> None:
        self._staged -= version.staged
        self.staged_nbytes -= version.staged_nbytes
        self.copies_nbytes -= sum(version.copies.values())
        version.copies.clear()


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
        self._stored: dict[StateClass, int] = {}
        self._versions = _OnTheirWay(plan.staging_buffers)
        self._nvme = _Peak()
        self._nvme_versions = 0
        self._bound = False
        self._groups = [self._group(index) for index in range(len(plan.groups))]
        self._owner = _owners(model.units)

    def _group(self, index: int) -> _Group:
        plan, group = self._plan, self._plan.groups[index]

        def piece(tier: TierName, kind: StateClass, nbytes: int, name: str) -> _Piece | None:
            if tier is not TierName.NVME:
                return None
            return _Piece(index, kind, nbytes, f"{group.name} {name}")

        chunks = group.layout.chunks(plan.chunk_numel)
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
            [pages(len(chunk) * self._run.itemsize) for chunk in chunks],
        )

    # ---------------------------------------------------------------- the run
    def run(self) -> None:
        for group in self._groups:
            self._load(group)
        for group in self._groups:
            self._load_checkpoint(group)
        for _ in range(STEPS):
            for number in range(self._run.passes):
                self._trace.begin_forward()
                self._forward()
                self._backward(last=number == self._run.passes - 1)
            self._trace.end_cycle()

    def found(self) -> Copies:
        nvme, stored = self._nvme.nbytes, self._nvme.by_class
        gradients = nvme_totals(self._plan, self._run)[StateClass.GRADIENTS]
        pressed = self._run.in_backward and self._staged and gradients > 0
        if pressed:  # where memory is short they may have to leave before they are used up
            nvme += gradients - stored.get(StateClass.GRADIENTS, 0)
            stored = {**stored, StateClass.GRADIENTS: gradients}
        bound = self._bound or pressed
        if self._bound:  # another order of arrivals than the one gone through: a chunk more
            nvme += self._largest_version()
        return Copies(
            self._peak.by_class, self._arena.high_water_nbytes, self._staged, nvme, stored,
            self._nvme_versions, bound,
        )  # fmt: skip

    def _largest_version(self) -> int:
        """What one chunk writes to nvme, at most."""
        return max(
            (weights if group.parameters is not None else 0)
            + (record.nbytes if record is not None else 0)
            for group in self._groups
            for record, weights in zip(group.records, group.weights, strict=True)
        )

    def _load(self, group: _Group) -> None:
        if group.parameters is not None:
            self._demand(group.parameters)
            self._enter(group.parameters.group)
        for record in group.records:
            if record is not None:
                self._demand(record)
                self._store(record)
        if group.parameters is not None:
            self._leave(group.parameters.group)
            self._store(group.parameters)

    def _load_checkpoint(self, group: _Group) -> None:
        """As one that is resumed does: copies leave without being waited for, until the end of the
        group; what has none is written piece by piece."""
        pieces = [piece for piece in (group.parameters, *group.records) if piece is not None]
        copies = {piece: piece.nbytes for piece in pieces if piece.offset is not None}
        absent = max((piece.nbytes for piece in pieces if piece.offset is None), default=0)
        self._versions.send(_Version(copies, absent, staged=False))
        self._note_nvme()
        self._versions.settle()

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
        if last and self._run.in_backward:
            group.gradients.dirty = True
        else:
            self._store(group.gradients)

    def _update(self, group: _Group, index: int) -> None:
        parameters, gradients = group.parameters, group.gradients
        if parameters is not None:
            self._offer(parameters, self._trace.next_use(index))
        pairs = zip(group.records, group.weights, strict=True)
        for chunk, (record, weights) in enumerate(pairs):
            if record is not None and self._keeps:
                self._offer(record, self._next_use(record))
            self._update_chunk(group, chunk, record, weights)
        if gradients is not None:
            self._give_back(gradients)

    def _update_chunk(self, group: _Group, chunk: int, record: _Piece | None, weights: int) -> None:
        parameters = group.parameters
        staged = any(
            part is not None and part.offset is None
            for part in (parameters, record, group.gradients)
        )
        self._staged |= staged
        writes = [(parameters, weights), (record, record.nbytes if record is not None else 0)]
        version = _Version({}, 0, staged, chunk)
        for piece, nbytes in writes:
            if piece is not None and piece.offset is None:
                version.staged_nbytes += nbytes
            elif piece is not None:
                version.copies[piece] = nbytes
        self._versions.send(version)
        self._note_nvme()

    def _give_back(self, gradients: _Piece) -> None:
        gradients.dirty = False
        if gradients.offset is not None:
            self._drop(gradients)
        if gradients.stored:
            gradients.stored = False
            self._stored[StateClass.GRADIENTS] -= gradients.nbytes

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

    # ---------------------------------------------------------------- nvme
    def _store(self, piece: _Piece) -> None:
        """A version of the whole piece is written, where there is none yet."""
        if not piece.stored:
            piece.stored = True
            self._stored[piece.state_class] = self._stored.get(piece.state_class, 0) + piece.nbytes
        self._note_nvme()

    def _note_nvme(self) -> None:
        sent = self._versions
        versions = min(sent.copies_nbytes, self._arena.nbytes) + sent.staged_nbytes
        self._bound |= versions > 0
        total = sum(self._stored.values()) + versions
        if total > self._nvme.nbytes:
            self._nvme = _Peak(total, dict(self._stored))
            self._nvme_versions = versions


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
