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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.planning.held_copies import HeldCopies, Uses
from offload.planning.plan import Plan
from offload.planning.plan_sizes import ITEMSIZE
from offload.planning.step_program import Action, StepProgram, Verb, write_program
from offload.tiers.extent import PAGE_NBYTES, TierName
from offload.tiers.units import round_up
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activation_facts import ActivationFacts
    from offload.planning.workload import Workload

_MOST_STEPS = 6  # until the bytes repeat; they have after two or three
_ACTIVATION_NBYTES = 2 << 20  # of one request: storages differ, pieces are at least that long


@dataclass(slots=True)
class Bytes:
    """Over each link, and requests of nvme."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    to_host: int = 0
    requests: int = 0

    def add(self, other: Bytes) -> None:
        self.read += other.read
        self.written += other.written
        self.to_device += other.to_device
        self.to_host += other.to_host
        self.requests += other.requests


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parameters asked for by an action: for its own group, or ahead."""

    group: int
    read_nbytes: int
    to_device_nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """An action with all bytes that it moves. What a use fetches is told by group, too."""

    action: Action
    nbytes: Bytes
    fetches: tuple[Fetch, ...] = ()


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
        _add_activations(plan, config, model, facts, moves)
    total = Bytes()
    for move in moves:
        total.add(move.nbytes)
    return Traffic(tuple(moves), total)


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
        self._fetches: list[Fetch] = []
        self._current: set[int] = set()  # groups whose mirror on the device is valid
        self._keep_records = plan.uses_nvme and _spare(plan) > 0
        self._pending: set[int] = set()
        self._passes = max(action.number for action in program.actions) + 1
        # a file is chosen by plan; sums that nobody planned for stay in memory
        self._trainable = [
            sum(spec.numel for spec in group.layout.params if spec.trainable)
            for group in plan.groups
        ]

    def load(self) -> None:
        """The first values pass through memory group by group, and leave copies there."""
        self._uses.learnt = False
        for index, group in enumerate(self._plan.groups):
            weights = self._name(index, "parameters")
            self._host.work_on(weights)
            if self._plan.parameters[index] is TierName.NVME:
                self._host.demand(weights, index, group.parameters, of_parameters=True)
            for chunk, (nbytes, tier) in enumerate(
                zip(group.records, self._plan.records[index], strict=True)
            ):
                if tier is TierName.NVME:
                    key = self._name(index, f"optimizer chunk {chunk}")
                    self._host.demand(key, index, nbytes, of_parameters=False)

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

    def _name(self, group: int, what: str) -> str:
        """As the runtime calls the state."""
        name = self._plan.groups[group].name
        return f"{'' if name == '(root)' else name} {what}"

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
        self._host.work_on(self._name(group, "parameters"))
        self._device.work_on(self._name(group, "parameters"))
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
        if plan.gpu and self._name(group, "parameters") in self._device and group in self._current:
            return True
        read, sent = moved.read, moved.to_device
        there = home is not TierName.NVME or self._bring_host(group, next_use, moved)
        there = there and (not plan.gpu or self._mirror(group, next_use, moved))
        if (moved.read, moved.to_device) != (read, sent):
            self._fetches.append(Fetch(group, moved.read - read, moved.to_device - sent))
        return there

    def _bring_host(self, group: int, next_use: float | None, moved: Bytes) -> bool:
        key = self._name(group, "parameters")
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
        key = self._name(group, "parameters")
        nbytes = self._plan.groups[group].parameters
        if key not in self._device:
            if next_use is None:
                self._device.demand(key, group, nbytes, of_parameters=True)
            elif not self._device.offer(key, group, nbytes, next_use, of_parameters=True):
                return False
        elif group in self._current:
            return True
        self._current.add(group)
        moved.to_device += self._plan.groups[group].layout.numel * self._itemsize
        return True

    def _chunks(self, group: int) -> int:
        return -(-self._plan.groups[group].layout.numel // self._plan.chunk_numel)

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
        key = self._name(group, "gradients")
        held = key in self._host
        self._host.work_on(self._name(group, "parameters"), key)
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
        sizes = plan.groups[group]
        weights = self._name(group, "parameters")
        gradients = self._name(group, "gradients")
        before = action.position - 1
        working = self._uses.order[before] if before >= 0 and not self._ahead else None
        busy = () if working is None else (self._name(working, "parameters"),)
        self._host.work_on(weights, gradients, *busy)
        on_nvme = plan.parameters[group] is TierName.NVME
        by_device = plan.gpu and all(tier is TierName.DEVICE for tier in plan.records[group])
        if on_nvme:
            self._bring_host(group, self._uses.of_parameters(group), moved)
        for index, (nbytes, tier) in enumerate(
            zip(sizes.records, plan.records[group], strict=True)
        ):
            self._record(group, index, nbytes, tier, moved)
            self._piece(group, index, nbytes, tier, moved)
        self._host.drop(gradients)
        self._pending.discard(group)
        if not by_device:
            self._current.discard(group)
        return moved

    def _record(self, group: int, index: int, nbytes: int, tier: TierName, moved: Bytes) -> None:
        if tier is not TierName.NVME:
            return
        key = self._name(group, f"optimizer chunk {index}")
        if key not in self._host:
            if self._keep_records:
                self._host.offer(
                    key, group, nbytes, self._uses.of_update(group), of_parameters=False
                )
            self._count_read(moved, nbytes, 1)
        moved.written += nbytes
        moved.requests += 1

    def _piece(self, group: int, index: int, record: int, tier: TierName, moved: Bytes) -> None:
        """Weight and gradient of one chunk."""
        plan = self._plan
        sizes = plan.groups[group]
        numel = min(plan.chunk_numel, sizes.layout.numel_trainable - index * plan.chunk_numel)
        weight = _pages(numel * self._itemsize)
        gradient = _pages(numel * (4 if sizes.summed else self._itemsize))
        stepped_there = tier is TierName.DEVICE and plan.gpu
        mirrored = self._name(group, "parameters") in self._device and group in self._current
        if plan.parameters[group] is TierName.NVME:
            if self._name(group, "parameters") not in self._host and not (
                stepped_there and mirrored
            ):
                self._count_read(moved, weight, 1)
            moved.written += weight
            moved.requests += 1
        if (
            plan.gradients[group] is TierName.NVME
            and self._name(group, "gradients") not in self._host
        ):
            self._count_read(moved, gradient, 1)
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


def _spare(plan: Plan) -> int:
    from offload.planning.plan import spare_host_nbytes

    return spare_host_nbytes(plan)


def _pages(nbytes: int) -> int:
    return round_up(max(nbytes, 1), PAGE_NBYTES)


# ---------------------------------------------------------------- activations
def _add_activations(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts,
    moves: Sequence[Move],
) -> None:  # fmt: skip
    """What is saved leaves during forward and comes back during backward.

    On nvme half of the window is never written, and what is still in the window is not read.
    """
    activations = plan.activations
    if activations is None:
        return
    parked = facts.saved_nbytes
    window = activations.window_nbytes
    written = read = 0
    if activations.tier is TierName.NVME:
        written = min(max(0, parked - window // 2), activations.disk_nbytes)
        read = max(0, min(written, parked - window))
    elif plan.gpu:
        parked = min(parked, window)
    for verb in (Verb.FORWARD, Verb.BACKWARD):
        chosen = [move for move in moves if move.action.verb is verb]
        blocks = {group for unit in model.units if unit.repeated for group in unit.groups}
        inside = [move for move in chosen if move.action.group in blocks] or chosen
        passes = max(move.action.number for move in inside) + 1 if inside else 1
        share = max(1, len(inside)) // passes or 1
        for index, move in enumerate(inside):
            part = index % share
            across = _part(parked, part, share) if plan.gpu else 0
            if verb is Verb.FORWARD:
                leaving = Bytes(written=_part(written, part, share), to_host=across)
            else:
                leaving = Bytes(read=_part(read, part, share), to_device=across)
            leaving.requests = -(-(leaving.read + leaving.written) // _ACTIVATION_NBYTES)
            move.nbytes.add(leaving)


def _part(nbytes: int, index: int, count: int) -> int:
    """Part `index` of `nbytes` in `count` whole parts that add up."""
    return nbytes * (index + 1) // count - nbytes * index // count
