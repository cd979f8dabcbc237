"""Bytes over every link in one step, action by action: what the runtime will move, from a plan.

    use          parameters at home on nvme are read unless a copy is in host memory, and cross to
                 the device unless one is there
    gradient     leaves the device, is written where its home is nvme; what a second pass adds to
                 is read back unless it is still in memory
    update       reads weight, record and gradient as far as no copy is in memory; writes weight and
                 record, always

Counted in a step of a long run: the program is run until two steps move the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.planning.activation_traffic import add_activations
from offload.planning.held_copies import HeldCopies, Uses
from offload.planning.moves import Bytes, Chunk, Fetch, Move, chunks_of
from offload.planning.plan import Plan, spare_host_nbytes
from offload.planning.plan_sizes import ITEMSIZE, own_numel, pages
from offload.planning.step_program import Action, StepProgram, Verb, write_program
from offload.tiers.extent import TierName
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activation_facts import ActivationFacts
    from offload.planning.workload import Workload

_MOST_STEPS = 6  # until the bytes repeat; they have after two or three


@dataclass(frozen=True)
class Traffic:
    """One step in the long run."""

    moves: tuple[Move, ...]
    total: Bytes = field(default_factory=Bytes)


def step_traffic(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts | None,
    workload: Workload, *, early: bool = False,
) -> Traffic:  # fmt: skip
    """The bytes of one step. Without `facts`, those of activations are left out.

    `early`: updates are over before the forward begins (see `write_program`).
    """
    program = write_program(config, model, workload.passes, early=early)
    steps = _Steps(plan, config, model, program)
    steps.load()
    moves = steps.run()
    before = -1
    for _ in range(_MOST_STEPS):
        moved = sum(m.nbytes.read + m.nbytes.to_device for m in moves)
        if moved == before:
            break
        before = moved
        moves = steps.run()
    if facts is not None:
        add_activations(plan, model, facts, moves)
    total = Bytes()
    for move in moves:
        total.add(move.nbytes)
    return Traffic(tuple(moves), total)


@dataclass(slots=True)
class _Piece:
    """What a group's chunks with records in one tier add up to."""

    tier: TierName
    numel: int = 0
    count: int = 0
    weight_nbytes: int = 0
    gradient_nbytes: int = 0


class _Steps:
    """Runs a program step after step over the copies that memory holds."""

    def __init__(
        self, plan: Plan, config: OffloadConfig, model: ModelShape, program: StepProgram
    ) -> None:
        self._plan, self._config, self._program = plan, config, program
        self._itemsize = ITEMSIZE[config.precision]
        self._ahead = config.optimizer.in_backward is True
        self._uses = Uses(program.uses)
        host = plan.budgets[TierName.HOST] - plan.total(TierName.HOST)
        self._host = HeldCopies(host, self._uses)
        device = plan.budgets[TierName.DEVICE] - plan.total(TierName.DEVICE)
        self._device = HeldCopies(device if plan.gpu else 0, self._uses)
        names = ["" if group.name == "(root)" else group.name for group in plan.groups]
        self._weights = [f"{name} parameters" for name in names]  # as the runtime calls states
        self._gradients = [f"{name} gradients" for name in names]
        chunks = chunks_of(plan)
        self._records = [  # on nvme
            [
                (f"{name} optimizer chunk {number}", chunk)
                for number, chunk in enumerate(own) if chunk.tier is TierName.NVME
            ]
            for name, own in zip(names, chunks, strict=True)
        ]  # fmt: skip
        self._pieces = [
            self._pieces_of(group.summed, own)
            for group, own in zip(plan.groups, chunks, strict=True)
        ]
        self._fetches: list[Fetch] = []
        self._current: set[int] = set()  # groups whose mirror on the device is valid
        self._keep_records = plan.uses_nvme and spare_host_nbytes(plan) > 0
        self._pending: set[int] = set()
        self._passes = max(action.number for action in program.actions) + 1
        # a file is chosen by plan; sums that nobody planned for stay in memory
        self._trainable = [  # of a GPU's gradients; reduced: this rank's part
            own_numel(group.layout, plan.sharding.rank)[0] for group in plan.groups if plan.gpu
        ]

    def load(self) -> None:
        """The first values pass through memory group by group, and leave copies there."""
        self._uses.learnt = False
        for index, group in enumerate(self._plan.groups):
            weights = self._weights[index]
            self._host.work_on(weights)
            if self._plan.parameters[index] is TierName.NVME:
                self._host.demand(weights, index, group.parameters, of_parameters=True)
            for key, chunk in self._records[index]:
                self._host.demand(key, index, chunk.record_nbytes, of_parameters=False)

    def run(self) -> list[Move]:
        """One step; the first one learns what is used when."""
        moves = self._run()
        self._uses.learnt = True
        return moves

    def _run(self) -> list[Move]:
        self._uses.cursor = 0
        self._host.begin_step()
        self._device.begin_step()
        updated = [a.group for a in self._program.actions if a.verb is Verb.UPDATE]
        self._pending = set() if self._ahead else set(updated)
        return [self._move(action) for action in self._program.actions]

    def _move(self, action: Action) -> Move:
        self._fetches = []
        return Move(action, self._do(action), tuple(self._fetches))

    def _pieces_of(self, summed: bool, chunks: list[Chunk]) -> list[_Piece]:
        """Weights and gradients of a group's chunks, by the tier of their records."""
        found: dict[TierName, _Piece] = {}
        for chunk in chunks:
            piece = found.setdefault(chunk.tier, _Piece(chunk.tier))
            piece.numel += chunk.numel
            piece.count += chunk.count
            piece.weight_nbytes += pages(chunk.numel * self._itemsize)
            piece.gradient_nbytes += pages(chunk.numel * (4 if summed else self._itemsize))
        return list(found.values())

    def _do(self, action: Action) -> Bytes:
        self._uses.cursor = action.position
        if action.verb is Verb.UPDATE:
            return self._update(action)
        if action.verb is Verb.GRADIENT:
            return self._gradient(action)
        return self._use(action)

    # ---------------------------------------------------------------- parameters
    def _use(self, action: Action) -> Bytes:
        moved = Bytes()
        group = action.group
        following = action.position + 1
        # a repeat in a row is at the place of the use before it
        repeated = action.position > 0 and self._uses.order[action.position - 1] == group
        self._uses.cursor = action.position if repeated else following
        self._host.work_on(self._weights[group])
        self._device.work_on(self._weights[group])
        self._bring(group, None, moved)
        if self._config.prefetch:
            for other in self._uses.upcoming(self._plan.prefetch):
                if other in self._pending:
                    continue
                if not self._bring(other, self._uses.of_parameters(other), moved):
                    break
        return moved

    def _bring(self, group: int, next_use: float | None, moved: Bytes) -> bool:
        """To where it is computed with; `next_use` None: at any cost."""
        plan, home = self._plan, self._plan.parameters[group]
        if home is TierName.DEVICE:
            return True
        if plan.gpu and self._weights[group] in self._device and group in self._current:
            return True
        read, sent = moved.read, moved.to_device
        there = home is not TierName.NVME or self._bring_host(group, next_use, moved)
        there = there and (not plan.gpu or self._mirror(group, next_use, moved))
        if (moved.read, moved.to_device) != (read, sent):
            self._fetches.append(Fetch(group, moved.read - read, moved.to_device - sent))
        return there

    def _bring_host(self, group: int, next_use: float | None, moved: Bytes) -> bool:
        key = self._weights[group]
        if key in self._host:
            return True
        nbytes = self._plan.groups[group].parameters
        there = True
        if next_use is None:
            self._host.demand(key, group, nbytes, of_parameters=True)
        else:
            there = self._host.offer(key, group, nbytes, next_use, of_parameters=True)
        if there:
            self._count_read(moved, nbytes, self._chunks(group))
        return there

    def _mirror(self, group: int, next_use: float | None, moved: Bytes) -> bool:
        key = self._weights[group]
        nbytes = self._plan.groups[group].parameters
        if key not in self._device:
            if next_use is None:
                self._device.demand(key, group, nbytes, of_parameters=True)
            elif not self._device.offer(key, group, nbytes, next_use, of_parameters=True):
                return False
        elif group in self._current:
            return True
        self._current.add(group)
        moved.to_device += self._plan.groups[group].home_numel * self._itemsize
        return True

    def _chunks(self, group: int) -> int:
        return -(-self._plan.groups[group].home_numel // self._plan.chunk_numel)

    # ---------------------------------------------------------------- gradients
    def _gradient(self, action: Action) -> Bytes:
        moved = Bytes()
        group, plan = action.group, self._plan
        home, sizes = plan.gradients[group], plan.groups[group]
        if plan.gpu and home is not TierName.DEVICE:
            # a first gradient leaves in the accumulator's format, a later one in its own
            own = self._itemsize
            itemsize = 4 if sizes.summed and action.number == 0 else own
            moved.to_host += self._trainable[group] * itemsize
        if home is not TierName.NVME:
            return moved
        key = self._gradients[group]
        held = key in self._host
        self._host.work_on(self._weights[group], key)
        self._host.demand(key, group, sizes.gradients, of_parameters=False)
        if action.number > 0 and not held:
            self._count_read(moved, sizes.gradients, len(sizes.records))
        last = action.number == self._passes - 1
        if self._ahead and last and key in self._host:
            self._host.pin(key)
        else:
            moved.written += sizes.gradients
            moved.requests += len(sizes.records)
        return moved

    # ---------------------------------------------------------------- updates
    def _update(self, action: Action) -> Bytes:
        moved = Bytes()
        group, plan = action.group, self._plan
        weights = self._weights[group]
        gradients = self._gradients[group]
        before = action.position - 1
        working = self._uses.order[before] if before >= 0 and not self._ahead else None
        busy = () if working is None else (self._weights[working],)
        self._host.work_on(weights, gradients, *busy)
        on_nvme = plan.parameters[group] is TierName.NVME
        by_device = plan.gpu and all(tier is TierName.DEVICE for tier in plan.records[group])
        if on_nvme:
            self._bring_host(group, self._uses.of_parameters(group), moved)
        for key, chunk in self._records[group]:
            self._record(group, key, chunk, moved)
        for piece in self._pieces[group]:  # of states that are locked: records do not displace them
            self._piece(group, piece, moved)
        self._host.drop(gradients)
        self._pending.discard(group)
        if not by_device:
            self._current.discard(group)
        return moved

    def _record(self, group: int, key: str, chunk: Chunk, moved: Bytes) -> None:
        if key not in self._host:
            if self._keep_records:
                self._host.offer(
                    key, group, chunk.record_nbytes, self._uses.of_update(group),
                    of_parameters=False,
                )  # fmt: skip
            self._count_read(moved, chunk.record_nbytes, chunk.count)
        moved.written += chunk.record_nbytes
        moved.requests += chunk.count

    def _piece(self, group: int, piece: _Piece, moved: Bytes) -> None:
        """Weights and gradients of the chunks with records in one tier."""
        plan, numel, tier = self._plan, piece.numel, piece.tier
        sizes = plan.groups[group]
        stepped_there = tier is TierName.DEVICE and plan.gpu
        mirrored = self._weights[group] in self._device and group in self._current
        if plan.parameters[group] is TierName.NVME:
            if self._weights[group] not in self._host and not (stepped_there and mirrored):
                self._count_read(moved, piece.weight_nbytes, piece.count)
            moved.written += piece.weight_nbytes
            moved.requests += piece.count
        if plan.gradients[group] is TierName.NVME and self._gradients[group] not in self._host:
            self._count_read(moved, piece.gradient_nbytes, piece.count)
        if not plan.gpu:
            return
        if stepped_there:
            at_home = plan.parameters[group] is TierName.DEVICE
            moved.to_device += 0 if at_home or mirrored else numel * self._itemsize
            moved.to_host += 0 if at_home else numel * self._itemsize
            there = plan.gradients[group] is TierName.DEVICE
            moved.to_device += 0 if there else numel * (4 if sizes.summed else self._itemsize)
        else:
            if plan.parameters[group] is TierName.DEVICE:
                moved.to_host += numel * self._itemsize
                moved.to_device += numel * self._itemsize
            if plan.gradients[group] is TierName.DEVICE:
                moved.to_host += numel * (4 if sizes.summed else self._itemsize)

    @staticmethod
    def _count_read(moved: Bytes, nbytes: int, requests: int) -> None:
        moved.read += nbytes
        moved.requests += requests
