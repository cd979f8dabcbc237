"""Simulates the steps of a plan without bytes: the bytes that the runtime will move over every link
by action, and the copies that host memory holds meanwhile.

    use          parameters at home on nvme are read unless a copy is in host memory, and cross to
                 the device unless one is there; of that, what was updated elsewhere crosses again
    gradient     leaves the device, is written where its home is nvme; what a second pass adds to
                 is read back unless it is still in memory
    update       reads weight, record and gradient as far as no copy is in memory; writes weight and
                 record, always

Counted in a step of a long run: the program is run until two steps move the same bytes, or nearly:
which copies are kept where not all find room may take turns for ever.

The permanent homes, staging buffers and the window of activations take their place in the host
arena before anything else; copies share what is left of it, one stretch of addresses:

    ├ window ┤├ staging ┤├ sums ┤├ homes of all groups ┤├──────────── copies ────────────┤

Copies are kept until their place is needed, so they grow to all that may ever be copied or to the
end of the budget. Between these two their peak depends on which sizes follow each other, and is
taken from the simulated steps, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from offload.planning.plan.kv_plan import KV_PAGE_NBYTES, KVHeld
from offload.planning.plan.plan import Plan, spare_host_nbytes, tried_groups
from offload.planning.plan.sizes import ITEMSIZE, RecordKind, own_numel, pages, record_kinds
from offload.planning.step.activation_traffic import add_activations
from offload.planning.step.held_copies import Copyable, HeldCopies
from offload.planning.step.program import (
    Action,
    Bytes,
    Fetch,
    Move,
    StepProgram,
    Verb,
    pieces_of,
    working_groups,
    write_program,
)
from offload.planning.step.representatives import Representatives, representatives
from offload.swap.states.trace import Trace
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activations.facts import ActivationFacts
    from offload.planning.plan.workload import Workload

_Take = Callable[[HeldCopies, Copyable], bool]  # a demand or an offer
_MOST_PASSES = 3  # that are simulated: the first, one between, the last
_MOST_CHUNKS = 1000  # whose copies are looked at one by one
_MOST_COPIED = 2048  # groups whose copies are looked at one by one
STRAIGHT_ROWS = 4  # `kernels.weight_products.MOST_ROWS`, which needs numba
_MOST_STEPS = 6  # until the bytes repeat; they have after two or three
_ALIKE = 0.002  # of them: no prediction tells less


@dataclass(frozen=True)
class StepTraffic:
    """The moves of one step in a long run."""

    moves: tuple[Move, ...]  # of actions of representatives
    experts: Representatives
    total: Bytes = field(default_factory=Bytes)


def step_traffic(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts | None,
    workload: Workload,
) -> StepTraffic:  # fmt: skip
    """The bytes of one step. Without `facts`, activations are left out."""
    experts = representatives(plan, model, workload)
    room = plan.budgets[Tier.HOST] - plan.total(Tier.HOST)
    run = StepRun(
        plan, config, experts, workload.passes, room, None if facts is None else facts.kv,
        _straight_groups(plan, config, experts.model, workload),
    )  # fmt: skip
    tried = tried_groups(plan, config)
    actions = write_program(config, experts.model, workload.passes, tried).actions
    moves = _all_passes(run.moves, actions)
    if facts is not None:
        add_activations(plan, experts.model, facts, moves)
    total = Bytes()
    for move in moves:
        total.add(move.nbytes)
    return StepTraffic(tuple(moves), experts, total)


def is_straight(rows: int, *, gpu: bool) -> bool:
    """Whether products of so many rows are computed from codes rather than from decoded weights."""
    return rows <= STRAIGHT_ROWS and not gpu


def _straight_groups(
    plan: Plan, config: OffloadConfig, model: ModelShape, workload: Workload
) -> Collection[int]:
    """The groups in codes that a pass does not decode: on a CPU few rows are multiplied straight
    from codes, and only looked-up rows of a table are decoded."""
    if plan.trains or plan.gpu:
        return ()
    rows = workload.batch * workload.sequence // pieces_of(config, workload.batch)
    everything = range(len(model.groups))
    if is_straight(rows, gpu=plan.gpu):
        return everything
    working = working_groups(model)
    return [group for group in everything if group not in working]


def _all_passes(moves: Sequence[Move], actions: Sequence[Action]) -> list[Move]:
    """The moves of a step of `actions`: passes that were not simulated are like the second one."""
    few, many = moves[-1].action.number, actions[-1].number
    by_pass: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_pass[move.action.number].append(move)
    same = [
        move for number in range(many + 1)
        for move in by_pass[few if number == many else min(number, 1)]
    ]  # fmt: skip
    return [
        Move(action, replace(move.nbytes), move.fetches)
        for action, move in zip(actions, same, strict=True)
    ]


class StepRun:
    """A program run step after step over the copies in memory, until two steps move the same bytes:
    `moves` are those of the last one. `room_nbytes` is the host memory for copies.

    In a step of many passes three are simulated: the first, one for all between, and the last.
    """

    def __init__(
        self, plan: Plan, config: OffloadConfig, experts: Representatives, passes: int,
        room_nbytes: int, kv: KVHeld | None = None, straight: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`straight` is the groups that are computed with as they are stored."""
        passes = min(passes, _MOST_PASSES)
        self._plan = plan
        self._experts = experts
        self._tried = tried_groups(plan, config)
        self._program = write_program(config, experts.model, passes, self._tried)
        self._itemsize = ITEMSIZE[config.precision]
        self._trace = Trace()
        self.host = HeldCopies(room_nbytes, self._trace)
        device = plan.budgets[Tier.DEVICE] - plan.total(Tier.DEVICE)
        self._device = HeldCopies(device if plan.gpu else 0, self._trace)
        self._name_states()
        self._straight = straight
        self._seats = dict(_seats(experts.model, kv))  # of caches, by the group before them
        self._fetches: list[Fetch] = []
        self._current: set[int] = set()  # groups whose mirror on the device is valid
        self._keep_records = plan.uses_nvme and spare_host_nbytes(plan) > 0
        self._has_gradients: set[int] = set()  # groups, since the first step
        self._pending: set[int] = set()
        self._staged = False  # a record had no copy
        self._working: int | None = None
        self._passes = passes
        # what lies in a file was planned; sums that were not planned stay in memory
        self._trainable = {  # of a GPU's gradients; reduced: this rank's part
            index: own_numel(plan.groups[index].layout, plan.sharding.rank)[0]
            for index in (experts.alike if plan.gpu else ())
        }
        self._load()
        self.moves = self._settled(config)

    def _name_states(self) -> None:
        """Name the states of each group in the same way as the runtime."""
        plan = self._plan
        self._weights: dict[int, Copyable] = {}
        self._decoded: dict[int, Copyable] = {}  # where the home has codes
        self._gradients: dict[int, Copyable] = {}
        self._records: dict[int, list[Copyable]] = {}  # on nvme
        self._kinds: dict[int, list[RecordKind]] = {}
        on_nvme = sum(tiers.count(Tier.NVME) for tiers in plan.records)
        together = max(1, -(-on_nvme // _MOST_CHUNKS))
        for index, alike in self._experts.alike.items():
            group, tiers = plan.groups[index], plan.records[index]
            name = "" if group.name == "(root)" else group.name
            self._weights[index] = Copyable(
                f"{name} parameters", index, alike * group.parameters, StateClass.PARAMETERS,
                passes=1.0 if plan.trains else alike / max(1, self._experts.used[index]),
            )  # fmt: skip
            if group.decoded:
                self._decoded[index] = replace(
                    self._weights[index], nbytes=alike * group.decoded, is_decoded=True
                )
            self._gradients[index] = Copyable(
                f"{name} gradients", index, self._experts.updated[index] * group.gradients,
                StateClass.GRADIENTS,
            )  # fmt: skip
            numbers = [n for n, tier in enumerate(tiers) if tier is Tier.NVME]
            joined = [numbers[n : n + together] for n in range(0, len(numbers), together)]
            self._records[index] = [
                Copyable(
                    f"{name} optimizer chunk {some[0]}", index,
                    alike * sum(group.records[n] for n in some), StateClass.OPTIMIZER, len(some),
                )
                for some in joined
            ]  # fmt: skip
            self._kinds[index] = list(record_kinds(group, tiers, plan.chunk_numel))

    def _settled(self, config: OffloadConfig) -> list[Move]:
        if self._tried:  # a first step tries none
            model = self._experts.model
            self._run(write_program(config, model, self._passes))
            self._run(write_program(config, model, self._passes, self._tried, begins=True))
        moves, before = self._run(self._program), -1
        for _ in range(_MOST_STEPS):
            moved = sum(m.nbytes.read + m.nbytes.to_device for m in moves)
            if abs(moved - before) <= _ALIKE * moved:
                break
            before, moves = moved, self._run(self._program)
        return moves

    @property
    def stages(self) -> bool:
        """Whether chunks without a copy pass through the update's buffers. An update ahead of the
        forward finds less room than in this simulation, where forward has reached its group."""
        return self._staged or self.host.evictions > 0

    def _load(self) -> None:
        """Load the first values, which pass through memory by group and leave copies there."""
        for index, weights in self._weights.items():
            self.host.work_on(weights)
            if self._plan.parameters[index] is Tier.NVME:
                self.host.demand(weights)
            if index in self._decoded and not self._plan.gpu:
                self.host.demand(self._decoded[index])
            for record in self._records[index]:
                self.host.demand(record)

    def _run(self, program: StepProgram) -> list[Move]:
        """Run one step; the first one learns the order of uses."""
        self._working = None
        self.host.begin_step()
        self._device.begin_step()
        forward = takewhile(lambda action: action.verb is not Verb.GRADIENT, program.actions)
        behind = {action.group for action in forward if action.verb is Verb.UPDATE}
        self._pending = behind & self._has_gradients
        moves = [self._move(action) for action in program.actions]
        self.host.drop_used_up()
        self._trace.end_cycle()
        return moves

    def _move(self, action: Action) -> Move:
        self._fetches = []
        moved = self._do(action)
        for gradients in self.host.sent:
            group = gradients.group
            chunks = len(self._plan.groups[group].records) * self._experts.updated[group]
            moved.to_nvme(gradients.nbytes, chunks)
        self.host.sent.clear()
        return Move(action, moved, tuple(self._fetches))

    def _do(self, action: Action) -> Bytes:
        if action.verb is Verb.UPDATE:
            return self._update(action)
        if action.verb is Verb.GRADIENT:
            return self._gradient(action)
        return self._use(action)

    # ---------------------------------------------------------------- parameters
    def _use(self, action: Action) -> Bytes:
        moved = Bytes()
        group = self._working = action.group
        self._trace.use(group)
        self.host.work_on(self._weights[group])
        self._device.work_on(self._weights[group])
        self._bring(group, moved, HeldCopies.demand)
        if group in self._seats and action.verb is Verb.FORWARD:
            self._attend(self._seats[group], moved)
        self._decode(group, moved)
        if self._plan.prefetch and self._trace.learnt:
            self._fetch_ahead(action, moved)
        return moved

    def _decode(self, group: int, moved: Bytes) -> None:
        """Decode the values of a used group where the model computes."""
        decoded = self._decoded.get(group)
        if decoded is None or group in self._straight:
            return
        memory = self._device if self._plan.gpu else self.host
        if decoded not in memory:
            memory.demand(decoded)
            moved.decoded += self._experts.used[group] * self._plan.groups[group].decoded
        memory.work_on(decoded)  # its codes have been read

    def _attend(self, seat: _Seat, moved: Bytes) -> None:
        """Use a layer's cache: attention reads its keys and values, and adds those of a token."""
        self._trace.use(seat.pages.group)
        if seat.pages.nbytes:
            if seat.pages not in self.host:
                self.host.work_on(self._weights[seat.group], seat.pages)
                self.host.demand(seat.pages)
                moved.from_nvme(seat.pages.nbytes, -(-seat.pages.nbytes // KV_PAGE_NBYTES))
            self.host.work_on(self._weights[seat.group], seat.pages)
        if self._plan.gpu:
            moved.to_device += seat.elsewhere_nbytes
            moved.to_host += seat.leaving_nbytes
        moved.to_nvme(seat.written_nbytes, 0)

    def _fetch_ahead(self, action: Action, moved: Bytes) -> None:
        """Fetch the next groups. The experts that a forward needs are known from the first use of
        their table on, when the router has chosen."""
        groups, used = self._experts.model.groups, self._experts.used
        here = groups[action.group].table
        left = self._plan.prefetch
        for group in self._trace.upcoming():
            if group >= len(groups):
                continue  # pages of a cache come as those of the one before leave
            table = groups[group].table
            if table and table != here and action.verb is Verb.FORWARD:
                continue
            if left <= 0:
                return
            left -= used[group]
            if group not in self._pending and not self._bring(group, moved, HeldCopies.offer):
                return

    def _bring(self, group: int, moved: Bytes, take: _Take) -> bool:
        """Bring a group to where the model computes, if `take` finds room for copies."""
        plan, home = self._plan, self._plan.parameters[group]
        if home is Tier.DEVICE:
            return True
        decoded = self._decoded.get(group)
        if decoded is not None and decoded in (self._device if plan.gpu else self.host):
            return True
        if plan.gpu and self._weights[group] in self._device and group in self._current:
            return True
        read, sent = moved.read, moved.to_device
        there = home is not Tier.NVME or self._bring_host(
            group, moved, take, self._experts.used[group]
        )
        there = there and (not plan.gpu or self._mirror(group, moved, take))
        if (moved.read, moved.to_device) != (read, sent):
            self._fetches.append(Fetch(group, moved.read - read, moved.to_device - sent))
        return there

    def _bring_host(self, group: int, moved: Bytes, take: _Take, count: int) -> bool:
        """Bring a group to host memory; `count` of those that it stands for are needed."""
        weights = self._weights[group]
        if weights in self.host:
            return True
        if not take(self.host, weights):
            return False
        nbytes = self._plan.groups[group].parameters
        moved.from_nvme(count * nbytes, count * self._chunks(group))
        return True

    def _mirror(self, group: int, moved: Bytes, take: _Take) -> bool:
        weights = self._weights[group]
        mirrored = weights in self._device
        if mirrored and group in self._current:
            return True
        if not take(self._device, weights):
            return False
        self._current.add(group)
        sizes = self._plan.groups[group]
        numel = sizes.updated_numel if mirrored else sizes.home_numel
        nbytes = sizes.parameters if sizes.decoded else numel * self._itemsize
        moved.to_device += self._experts.used[group] * nbytes
        return True

    def _chunks(self, group: int) -> int:
        sizes, chunk = self._plan.groups[group], self._plan.chunk_numel
        if sizes.decoded:
            return -(-sizes.parameters // (chunk * self._itemsize))
        frozen = sizes.home_numel - sizes.updated_numel
        return -(-sizes.updated_numel // chunk) - (-frozen // chunk)

    # ---------------------------------------------------------------- gradients
    def _gradient(self, action: Action) -> Bytes:
        moved = Bytes()
        group, plan = action.group, self._plan
        home, sizes = plan.gradients[group], plan.groups[group]
        used = self._experts.used[group]
        self._has_gradients.add(group)
        if plan.gpu and home is not Tier.DEVICE:
            # a first gradient leaves in the accumulator's format, a later one in its own
            own = self._itemsize
            itemsize = 4 if sizes.summed and action.number == 0 else own
            moved.to_host += used * self._trainable[group] * itemsize
        if home is not Tier.NVME:
            return moved
        gradients = self._gradients[group]
        held = gradients in self.host
        self.host.work_on(self._weights[group], gradients)
        self.host.demand(gradients)
        if action.number > 0 and not held:
            moved.from_nvme(used * sizes.gradients, used * len(sizes.records))
        if gradients in self.host:
            self.host.write(gradients)
        else:
            moved.to_nvme(gradients.nbytes, self._experts.updated[group] * len(sizes.records))
        if plan.prefetch and self._trace.learnt:
            self._fetch_ahead(action, moved)  # before the unit lets go of its parameters
        return moved

    # ---------------------------------------------------------------- updates
    def _update(self, action: Action) -> Bytes:
        moved = Bytes()
        group, plan = action.group, self._plan
        if group not in self._has_gradients:
            return moved  # behind the step before the first one
        busy = {group}
        if self._working is not None and group in self._pending:
            busy.add(self._working)
        self.host.work_on(self._gradients[group], *(self._weights[other] for other in busy))
        by_device = plan.gpu and all(tier is Tier.DEVICE for tier in plan.records[group])
        if plan.parameters[group] is Tier.NVME:
            self._bring_host(group, moved, HeldCopies.offer, self._experts.updated[group])
        for record in self._records[group]:
            self._record(record, moved)
        for kind in self._kinds[group]:  # of states that are locked: records do not displace them
            self._update_kind(group, kind, moved)
        if group in self._pending or group not in self._tried:
            self.host.drop(self._gradients[group])
        else:  # they stay for a step that has to be redone
            self.host.use_up(self._gradients[group])
            self.host.keep_old(self._tried[group].memory)
        self._pending.discard(group)
        if not by_device:
            self._current.discard(group)
        return moved

    def _record(self, record: Copyable, moved: Bytes) -> None:
        updated = self._experts.updated[record.group]
        nbytes = record.nbytes // self._experts.alike[record.group] * updated
        chunks = updated * record.chunks
        if record not in self.host:
            self._staged |= not (self._keep_records and self.host.offer(record))
            moved.from_nvme(nbytes, chunks)
        moved.to_nvme(nbytes, chunks)

    def _update_kind(self, group: int, kind: RecordKind, moved: Bytes) -> None:
        """Move the weights and gradients of chunks whose records are equal."""
        plan, tier = self._plan, kind.tier
        sizes = plan.groups[group]
        count = self._experts.updated[group] * kind.count
        numel, gradient_itemsize = kind.numel * count, 4 if sizes.summed else self._itemsize
        stepped_there = tier is Tier.DEVICE and plan.gpu
        mirrored = self._weights[group] in self._device and group in self._current
        if plan.parameters[group] is Tier.NVME:
            nbytes = count * pages(kind.numel * self._itemsize)
            if self._weights[group] not in self.host and not (stepped_there and mirrored):
                moved.from_nvme(nbytes, count)
            moved.to_nvme(nbytes, count)
        if plan.gradients[group] is Tier.NVME and self._gradients[group] not in self.host:
            nbytes = count * pages(kind.numel * gradient_itemsize)
            moved.from_nvme(nbytes, count)
        if not plan.gpu:
            return
        if stepped_there:
            at_home = plan.parameters[group] is Tier.DEVICE
            moved.to_device += 0 if at_home or mirrored else numel * self._itemsize
            moved.to_host += 0 if at_home else numel * self._itemsize
            there = plan.gradients[group] is Tier.DEVICE
            moved.to_device += 0 if there else numel * gradient_itemsize
        else:
            if plan.parameters[group] is Tier.DEVICE:
                moved.to_host += numel * self._itemsize
                moved.to_device += numel * self._itemsize
            if plan.gradients[group] is Tier.DEVICE:
                moved.to_host += numel * gradient_itemsize


@dataclass(frozen=True)
class PeakCopies:
    """The host tier's copies of states on nvme or in codes, at their peak, in bytes."""

    by_class: dict[StateClass, int]  # copies in host memory, when they are most
    touched_nbytes: int  # of host memory that copies have ever lain in
    staged: bool  # whether chunks pass through the staging buffers

    @property
    def nbytes(self) -> int:
        return sum(self.by_class.values())


@dataclass(frozen=True, slots=True)
class _Seat:
    """A layer's cache in the trace, in bytes of one pass."""

    group: int  # of its block
    pages: Copyable  # on nvme
    elsewhere_nbytes: int  # that are not where the model computes
    leaving_nbytes: int  # added, on their way from there
    written_nbytes: int


def _seats(model: ModelShape, kv: KVHeld | None) -> Iterator[tuple[int, _Seat]]:
    """The caches, distributed over the blocks in order."""
    blocks = [unit.groups[0] for unit in model.units if unit.repeated and unit.groups]
    count = len(kv.read) if kv is not None else 0
    if kv is None or not blocks or not count:
        return
    share = len(blocks)
    for index, block in enumerate(blocks):
        layers = slice(index * count // share, (index + 1) * count // share)
        number = len(model.groups) + index
        pages = Copyable(f"cache {index}", number, sum(kv.read[layers]), StateClass.KV)
        yield (
            block,
            _Seat(block, pages, sum(kv.crossing[layers]), kv.leaving // share, kv.written // share),
        )


def find_copies(
    plan: Plan, config: OffloadConfig, model: ModelShape, passes: int, room_nbytes: int,
    kv: KVHeld | None = None,
) -> PeakCopies:  # fmt: skip
    """Find the copies in `room_nbytes` of host memory beside the homes there, in steps of `passes`.
    In a long run every expert is touched and leaves copies."""
    if not plan.copies_on_host:
        return PeakCopies({}, 0, staged=False)
    experts = representatives(plan, model, None, _MOST_COPIED)
    run = StepRun(plan, config, experts, passes, room_nbytes, kv)
    return PeakCopies(run.host.most, run.host.high_water_nbytes, run.stages)
