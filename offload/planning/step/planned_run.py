"""A step's program, run over states without bytes (`planned_states`) by the runtime's own classes:
its `SlotPool` keeps and evicts copies, its `Fetcher` fetches ahead of its `Trace`. What moves is
the prediction:

    use          parameters at home on nvme are read unless a copy is in host memory, and cross to
                 the device unless one is there; of that, what was updated elsewhere crosses again
    gradient     leaves the device, is written where its home is nvme; what a second pass adds to
                 is read back unless it is still in memory
    update       reads weight, record and gradient as far as no copy is in memory; writes weight and
                 record, always

The permanent homes, staging buffers and the window of activations take their place in the host
arena before anything else; copies share what is left of it, one stretch of addresses:

    ├ window ┤├ staging ┤├ sums ┤├ homes of all groups ┤├──────────── copies ────────────┤
"""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from offload.planning.plan.kv_plan import KV_PAGE_NBYTES, KVHeld
from offload.planning.plan.plan import Plan, spare_host_nbytes, tried_groups
from offload.planning.plan.sizes import (
    ITEMSIZE,
    RecordKind,
    own_numel,
    pages,
)
from offload.planning.step.planned_states import PlannedState, PlannedStates, Seat
from offload.planning.step.program import (
    Action,
    Bytes,
    Fetch,
    Move,
    StepProgram,
    Verb,
    write_program,
)
from offload.planning.step.representatives import Representatives
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.groups.fetching import REPEATS

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.tiers.memory_tier import Lease

_MOST_PASSES = 3  # that are simulated: the first, one between, the last
_MOST_CHUNKS = 128  # whose copies are looked at one by one: each takes time
_MOST_STEPS = 6  # until the bytes repeat; they have after two or three
_ALIKE = 0.002  # of them: no prediction tells less


class PlannedRun:
    """A program run step after step over the copies in memory, until two steps move the same bytes:
    `moves` are those of the last one. `room_nbytes` is the host memory for copies.

    In a step of many passes three are simulated: the first, one for all between, and the last.
    """

    def __init__(
        self, plan: Plan, config: OffloadConfig, experts: Representatives, passes: int,
        room_nbytes: int, kv: KVHeld | None = None, most_chunks: int = _MOST_CHUNKS,
    ) -> None:  # fmt: skip
        passes = min(passes, _MOST_PASSES)
        self._plan = plan
        self._experts = experts
        self._tried = tried_groups(plan, config)
        self._program = write_program(config, experts.model, passes, self._tried)
        self._itemsize = ITEMSIZE[config.precision]
        self.states = states = PlannedStates(plan, experts, room_nbytes, kv, most_chunks)
        states.fetcher.updates = self
        self._fetcher, self._trace, self.host = states.fetcher, states.fetcher.trace, states.host
        self._weights, self._mirrors = states.weights, states.mirrors
        self._decoded, self._gradients = states.decoded, states.gradients
        for group, item in states.items.items():
            item.bring_at = partial(self._bring, group)
            self._weights[group].filled = partial(self._read_weights, group)
            self._gradients[group].sent = partial(self._write_gradients, group)
        for seat in states.seats.values():
            read = seat.pages.nbytes
            seat.pages.filled = partial(self._read, read, -(-read // KV_PAGE_NBYTES))
        self._announced = ""  # the table whose experts the forward chose last
        blocks = {g for unit in experts.model.units if unit.repeated for g in unit.groups}
        recomputes = config.placement.activations.checkpoint is True
        in_pieces = config.micro_batches > 1  # gradients come when the block is over
        self._recomputed = blocks if recomputes and not in_pieces else set()
        # groups whose weights nothing fetches between their first gradient and their last
        self._quiet = blocks if recomputes or in_pieces else set()
        self.steps: list[Bytes] = []  # what each simulated one moves
        self._moved = Bytes()  # by the current action
        self._fetches: list[Fetch] = []
        self._locked: list[PlannedState] = []
        self._current: set[int] = set()  # groups whose mirror on the device is valid
        self._keep_records = plan.uses_nvme and spare_host_nbytes(plan) > 0
        self._has_gradients: set[int] = set()  # groups, since the first step
        self._pending: set[int] = set()
        self._deferred: set[int] = set()  # groups that found no memory for an old version
        self._old: list[Lease] = []  # of what that would go back to
        self._updates = False  # whether the current action is an update
        self._staged = False  # a record had no copy
        self._working: int | None = None
        self._pass = -1
        self._passes = passes
        # what lies in a file was planned; sums that were not planned stay in memory
        self._trainable = {  # of a GPU's gradients; reduced: this rank's part
            index: own_numel(plan.groups[index].layout, plan.sharding.rank)[0]
            for index in (experts.alike if plan.gpu else ())
        }
        self._load()
        self.moves = self._settled(config)

    # ---------------------------------------------------------------- steps
    def _settled(self, config: OffloadConfig) -> list[Move]:
        if self._tried:  # a first step tries none
            model = self._experts.model
            self._run(write_program(config, model, self._passes))
            self._run(write_program(config, model, self._passes, self._tried, begins=True))
        moves, before = self._run(self._program), -1
        for _ in range(_MOST_STEPS):
            moved = self.steps[-1].read + self.steps[-1].to_device
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
            self._lock(weights)
            if self._plan.parameters[index] is Tier.NVME:
                weights.take(None, fill=False)
            if index in self._decoded and not self._plan.gpu:
                self._decoded[index].take(None, fill=False)
            for record in self.states.records[index]:
                record.take(None, fill=False)

    def _run(self, program: StepProgram) -> list[Move]:
        """Run one step; the first one learns the order of uses."""
        self._working, self._pass = None, -1
        forward = takewhile(lambda action: action.verb is not Verb.GRADIENT, program.actions)
        behind = {action.group for action in forward if action.verb is Verb.UPDATE}
        self._pending = (behind & self._has_gradients) | self._deferred
        self._deferred = set()
        moves = [self._move(action) for action in program.actions]
        self._lock()
        for group in self.states.used_up:
            self._gradients[group].evict()
        self.states.used_up.clear()
        while self._old:
            self._old.pop().free()
        if self._plan.trains:
            self._trace.end_cycle()
        self.steps.append(Bytes())
        for move in moves:
            self.steps[-1].add(move.nbytes)
        return moves

    def _move(self, action: Action) -> Move:
        self._moved, self._fetches = Bytes(), []
        self._updates = action.verb is Verb.UPDATE
        if self._updates:
            self._update(action.group)
        elif action.verb is Verb.GRADIENT:
            self._gradient(action)
        else:
            self._use(action)
        return Move(action, self._moved, tuple(self._fetches))

    def _lock(self, *states: PlannedState) -> None:
        """Lock the copies that are in use now, and unlock the ones that were."""
        for state in self._locked:
            state.is_locked = False
        self._locked = list(states)
        for state in states:
            state.is_locked = True

    # ---------------------------------------------------------------- what the fetcher asks
    def is_pending(self, index: int) -> bool:
        return bool(self._pending) and self.states.numbered[index] in self._pending

    def promote(self, index: int) -> None:
        """Do nothing: the program has the update before the use."""

    # ---------------------------------------------------------------- parameters
    def _use(self, action: Action) -> None:
        group = self._working = action.group
        item, forward = self.states.items[group], action.verb is Verb.FORWARD
        if forward and action.number != self._pass:
            self._pass, self._announced = action.number, ""
            self._fetcher.begin_forward()
        table = self._experts.model.groups[group].table
        if forward and table and table != self._announced:  # its router has chosen
            self._announced = table
            self._fetcher.announce(self.states.tables[table])
        if group in self._pending:
            self._update(group)
        self._lock(*(each[group] for each in (self._weights, self._mirrors) if group in each))
        self._fetcher.need(item, backward=not forward)
        self._fetcher.fetch_ahead()
        self._bring(group, None)
        if group in self.states.seats and forward:
            self._attend(self.states.seats[group])
        self._decode(group)

    def _decode(self, group: int) -> None:
        """Decode the values of a used group where the model computes."""
        decoded = self._decoded.get(group)
        if decoded is None:
            return
        if not decoded.is_held:
            decoded.take(None, fill=False)
            self._moved.decoded += self._experts.used[group] * self._plan.groups[group].decoded
        self._lock(decoded)  # its codes have been read

    def _attend(self, seat: Seat) -> None:
        """Use a layer's cache: attention reads its keys and values, and adds those of a token."""
        self._lock(self._weights[seat.group], seat.pages)
        self._fetcher.need(seat.item)
        self._fetcher.fetch_ahead()
        seat.pages.prefetch(next_use=None)
        if self._plan.gpu:
            self._moved.to_device += seat.elsewhere_nbytes
            self._moved.to_host += seat.leaving_nbytes
        self._moved.to_nvme(seat.written_nbytes, 0)

    def _bring(self, group: int, next_use: float | None) -> bool:
        """Bring a group to where the model computes, as `State.prefetch` does."""
        home = self._plan.parameters[group]
        decoded, mirror = self._decoded.get(group), self._mirrors.get(group)
        if home is Tier.DEVICE or (decoded is not None and decoded.is_held):
            return True
        if mirror is not None and mirror.is_held and group in self._current:
            return True
        read, sent = self._moved.read, self._moved.to_device
        there = home is not Tier.NVME or self._weights[group].prefetch(next_use=next_use)
        if there and mirror is not None:
            there = self._mirror(group, mirror, next_use)
        if (self._moved.read, self._moved.to_device) != (read, sent):
            self._fetches.append(
                Fetch(group, self._moved.read - read, self._moved.to_device - sent)
            )
        return there

    def _mirror(self, group: int, mirror: PlannedState, next_use: float | None) -> bool:
        mirrored, sizes = mirror.is_held, self._plan.groups[group]
        if not mirror.take(next_use, fill=False):
            return False
        self._current.add(group)
        numel = sizes.updated_numel if mirrored else sizes.home_numel
        nbytes = sizes.parameters if sizes.decoded else numel * self._itemsize
        self._moved.to_device += self._experts.used[group] * nbytes
        return True

    def _read(self, nbytes: int, chunks: int) -> None:
        self._moved.from_nvme(nbytes, chunks)

    def _read_weights(self, group: int) -> None:
        """Count the read of those of a group's parameters that are needed."""
        count = (self._experts.updated if self._updates else self._experts.used)[group]
        self._read(count * self._plan.groups[group].parameters, count * self._chunks(group))

    def _chunks(self, group: int) -> int:
        sizes, chunk = self._plan.groups[group], self._plan.chunk_numel
        if sizes.decoded:
            return -(-sizes.parameters // (chunk * self._itemsize))
        frozen = sizes.home_numel - sizes.updated_numel
        return -(-sizes.updated_numel // chunk) - (-frozen // chunk)

    # ---------------------------------------------------------------- gradients
    def _gradient(self, action: Action) -> None:
        group, plan = action.group, self._plan
        home, sizes = plan.gradients[group], plan.groups[group]
        used = self._experts.used[group]
        self._has_gradients.add(group)
        if plan.gpu and home is not Tier.DEVICE:
            # a first gradient leaves in the accumulator's format, a later one in its own
            own = self._itemsize
            itemsize = 4 if sizes.summed and action.number == 0 else own
            self._moved.to_host += used * self._trainable[group] * itemsize
        if home is not Tier.NVME:
            return
        gradients = self._gradients[group]
        if action.number > 0 and not gradients.is_held:
            self._moved.from_nvme(used * sizes.gradients, used * len(sizes.records))
        # a block that was computed again holds its weights until its gradients are there
        self._lock(gradients, *([self._weights[group]] if group in self._recomputed else ()))
        were_held = self._weights[group].is_held
        gradients.take(None, fill=False)  # for its first part, while no operation has a view
        count = len(self._experts.model.groups[group].params)
        if count > REPEATS and group not in self._quiet:  # operations follow in the unit
            # those of a bundle are used one after the other
            if were_held and group == self._working and self._experts.alike[group] == 1:
                self._bring(group, None)
            self._fetcher.fetch_ahead()
        if gradients.is_held:
            gradients.write()
        else:
            self._write_gradients(group)

    def _write_gradients(self, group: int) -> None:
        chunks = self._experts.updated[group] * len(self._plan.groups[group].records)
        self._moved.to_nvme(self._gradients[group].nbytes, chunks)

    # ---------------------------------------------------------------- updates
    def _update(self, group: int) -> None:
        plan = self._plan
        if group not in self._has_gradients:
            return  # behind the step before the first one
        gradients, weights = self._gradients[group], self._weights[group]
        is_tried = group in self._tried and group not in self._pending
        self._lock()
        if is_tried and not self._keep_old(self._tried[group].memory):
            self._deferred.add(group)
            return
        by_device = plan.gpu and all(tier is Tier.DEVICE for tier in plan.records[group])
        if plan.parameters[group] is Tier.NVME:
            weights.prefetch(next_use=weights.next_use())
        self._lock(gradients, weights)  # chunk by chunk, once the weights have their place
        for record in self.states.records[group]:
            self._record(group, record)
        for kind in self.states.kinds[group]:  # records displace no states that are locked
            self._update_kind(group, kind, self._moved)
        self._lock(weights)
        if is_tried:  # gradients stay for a step that has to be redone
            self.states.used_up.add(group)
        else:
            gradients.evict()
        self._pending.discard(group)
        if not by_device:
            self._current.discard(group)

    def _keep_old(self, nbytes: int) -> bool:
        """Keep the old version of a state at home in host memory until the step ends. Returns False
        if there is no memory for it."""
        if not nbytes:
            return True
        left = self._trace.uses_left
        lease = self.host.offer(nbytes, "", StateClass.STAGING, next_use=left)
        if lease is not None:
            self._old.append(lease)
        return lease is not None

    def _record(self, group: int, record: PlannedState) -> None:
        updated = self._experts.updated[group]
        nbytes = record.nbytes // self._experts.alike[group] * updated
        chunks = updated * record.chunks
        if not record.is_held:
            kept = self._keep_records and record.take(record.next_use(), fill=False)
            self._staged |= not kept
            self._moved.from_nvme(nbytes, chunks)
        self._moved.to_nvme(nbytes, chunks)

    def _update_kind(self, group: int, kind: RecordKind, moved: Bytes) -> None:
        """Move the weights and gradients of chunks whose records are equal."""
        plan, tier = self._plan, kind.tier
        sizes = plan.groups[group]
        count = self._experts.updated[group] * kind.count
        numel, gradient_itemsize = kind.numel * count, 4 if sizes.summed else self._itemsize
        stepped_there = tier is Tier.DEVICE and plan.gpu
        mirrored = group in self._current and self._mirrors[group].is_held
        if plan.parameters[group] is Tier.NVME:
            nbytes = count * pages(kind.numel * self._itemsize)
            if not self._weights[group].is_held and not (stepped_there and mirrored):
                moved.from_nvme(nbytes, count)
            moved.to_nvme(nbytes, count)
        if plan.gradients[group] is Tier.NVME and not self._gradients[group].is_held:
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
