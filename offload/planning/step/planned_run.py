"""Runs a step's program over states without bytes (`planned_states`), with the runtime's classes:
`SlotPool` keeps and evicts copies, `Fetcher` prefetches by its `Trace`. The prediction is the bytes
that move:

    use          parameters at home on nvme are read unless a copy is in host memory, and cross to
                 the device unless a copy is there; parts updated on the CPU cross again
    gradient     leaves the device, and is written if its home is nvme; a gradient that a second
                 pass adds to is read back unless it is still in memory
    update       reads weight, record and gradient unless a copy is in memory; always writes weight
                 and record

The permanent homes, staging buffers and the window of activations take their place in the host
arena before anything else; copies share the rest of it, one range of addresses:

    ├ window ┤├ staging ┤├ sums ┤├ homes of all groups ┤├──────────── copies ────────────┤
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from offload.planning.plan.plan import Plan, spare_host_nbytes, speculative_groups
from offload.planning.plan.sizes import ITEMSIZE, RecordKind, pages
from offload.planning.step.planned_states import PlannedGroup, PlannedState, pool_of
from offload.planning.step.program import Action, Bytes, Fetch, Move, Verb, total_of, write_program
from offload.planning.step.representatives import Representatives
from offload.swap.states.fetching import REPEATS, Fetcher, PendingUpdates
from offload.tiers.ledger import StateClass, TierAccount
from offload.tiers.tier import Tier

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.tiers.memory_tier import Lease

MAX_PASSES = 3  # that are simulated: the first, one between, the last
_MAX_CHUNKS = 128  # whose copies are looked at one by one: each takes time
_MAX_STEPS = 6  # until the bytes repeat; they have after two or three
_ALIKE = 0.002  # of them: no prediction tells less


class PlannedRun(PendingUpdates):
    """Runs a program step after step over simulated copies in memory, until two steps in a row move
    the same bytes: `moves` are the last step's.

    Of a step's many passes three are simulated: the first, one for all in between, and the last.
    """

    def __init__(
        self, plan: Plan, config: OffloadConfig, experts: Representatives, passes: int,
        max_chunks: int = _MAX_CHUNKS,
    ) -> None:  # fmt: skip
        """Prepare the run. If nvme has more than `max_chunks` records, several are simulated as
        one."""
        self._plan, self.experts = plan, experts
        self._speculative = speculative_groups(plan, config)
        self._itemsize = ITEMSIZE[config.precision]
        self._keep_records = plan.uses_nvme and spare_host_nbytes(plan) > 0
        blocks = {g for unit in experts.model.units if unit.repeated for g in unit.groups}
        recomputes = config.placement.activations.checkpoint is True
        # nothing fetches weights of these groups between their first gradient and their last
        self._recomputed = blocks if recomputes else set()
        self.memory, self._host = pool_of(plan.budgets[Tier.HOST] - plan.total(Tier.HOST))
        self.files = TierAccount(plan.budgets[Tier.NVME])  # of gradients that were written
        self._fetcher = Fetcher(plan.prefetch)
        self._fetcher.updates = self
        self._trace = self._fetcher.trace
        self._host.uses_left = lambda: self._trace.cursor.uses_left
        self._groups = self._all_groups(experts, max_chunks)
        self._numbered = list(self._groups)  # by the fetcher's numbers
        self._tables: dict[str, list[PlannedGroup]] = defaultdict(list)
        for unit in experts.model.units:
            self._tables[unit.table] += [self._groups[group] for group in unit.groups]
        self.steps: list[Bytes] = []  # what each simulated one moves
        self._moved = Bytes()  # by the current action
        self._fetches: list[Fetch] = []
        self._locked: list[PlannedState] = []
        self._pending: set[int] = set()
        self._deferred: set[int] = set()  # groups that found no memory for an old version
        self._old: list[Lease] = []  # of what that would go back to
        self._updates = False  # whether the current action is an update
        self._staged = False  # a record had no copy
        self._working: int | None = None
        self._announced = ""  # the table whose experts the forward chose last
        self._pass = -1
        self._load()
        program = partial(write_program, config, experts.model, min(passes, MAX_PASSES))
        if self._speculative:  # a first step tries none
            self._run(program())
            self._run(program(self._speculative, begins=True))
        self.moves = self._settled(program(self._speculative))

    def _all_groups(self, experts: Representatives, max_chunks: int) -> dict[int, PlannedGroup]:
        plan, groups = self._plan, {}
        room = plan.budgets[Tier.DEVICE] - plan.total(Tier.DEVICE)
        _, device = pool_of(room if plan.gpu else 0)
        on_nvme = sum(tiers.count(Tier.NVME) for tiers in plan.records)
        together = max(1, -(-on_nvme // max_chunks))
        for index in experts.alike:
            groups[index] = group = PlannedGroup(
                plan, experts, index, self._fetcher, self._host, device, together
            )
            group.on_prefetch = partial(self._prefetch, group)
            group.weights.filled = partial(self._read_weights, group)
            group.gradients.sent = partial(self._write_gradients, group)
            self._fetcher.add(group, group.shape.table)
        return groups

    # ---------------------------------------------------------------- steps
    def _settled(self, program: Sequence[Action]) -> list[Move]:
        moves, before = self._run(program), -1
        for _ in range(_MAX_STEPS):
            moved = self.steps[-1].read + self.steps[-1].to_device
            if abs(moved - before) <= _ALIKE * moved:
                break
            before, moves = moved, self._run(program)
        return moves

    @property
    def stages(self) -> bool:
        """Whether chunks without a copy pass through the update's buffers. An update ahead of the
        forward finds less room than in this simulation, where forward has reached its group."""
        return self._staged or self.memory.lacked_room

    def _load(self) -> None:
        """Load the first values, which pass through memory by group and leave copies there."""
        for group in self._groups.values():
            self._lock(group.weights)
            if group.home is Tier.NVME:
                group.weights.take(None)
            if group.dequantized is not None and not self._plan.gpu:
                group.dequantized.take(None)
            for record in group.records:
                record.take(None)

    def _run(self, program: Sequence[Action]) -> list[Move]:
        """Run one step; the first one learns the order of uses."""
        self._working, self._pass = None, -1
        forward = takewhile(lambda action: action.verb is not Verb.GRADIENT, program)
        behind = {action.group for action in forward if action.verb is Verb.UPDATE}
        with_gradients = {index for index, group in self._groups.items() if group.has_gradients}
        self._pending = (behind & with_gradients) | self._deferred
        self._deferred = set()
        moves = [self._move(action) for action in program]
        self._lock()
        for group in self._groups.values():
            if group.is_used_up:
                self._drop_gradients(group)
                group.is_used_up = False
        while self._old:
            self._old.pop().free()
        if self._plan.trains:
            self._trace.end_cycle()
        self.steps.append(total_of(moves))
        return moves

    def _move(self, action: Action) -> Move:
        self._moved, self._fetches = Bytes(), []
        self._updates = action.verb is Verb.UPDATE
        group = self._groups[action.group]
        if self._updates:
            self._update(group)
        elif action.verb is Verb.GRADIENT:
            self._gradient(group, action)
        else:
            self._use(group, action)
        return Move(action, self._moved, tuple(self._fetches))

    def _lock(self, *states: PlannedState | None) -> None:
        """Lock the copies that are in use now, and unlock the ones that were."""
        for state in self._locked:
            state.is_locked = False
        self._locked = [state for state in states if state is not None]
        for state in self._locked:
            state.is_locked = True

    # ---------------------------------------------------------------- what the fetcher asks
    def is_pending(self, index: int) -> bool:
        return bool(self._pending) and self._numbered[index] in self._pending

    # ---------------------------------------------------------------- parameters
    def _use(self, group: PlannedGroup, action: Action) -> None:
        self._working, forward = group.group, action.verb is Verb.FORWARD
        if forward and action.number != self._pass:
            self._pass, self._announced = action.number, ""
            self._fetcher.begin_forward()
        table = group.shape.table
        if forward and table and table != self._announced:  # its router has chosen
            self._announced = table
            self._fetcher.announce(self._tables[table])
        if group.group in self._pending:
            self._update(group)
        self._lock(group.weights, group.mirror)
        self._fetcher.need(group, backward=not forward)
        self._fetcher.fetch_ahead()
        self._prefetch(group, None)
        if group.dequantized is not None:
            if not group.dequantized.is_held:
                group.dequantized.take(None)
                self._moved.dequantized += group.used * group.sizes.dequantized
            self._lock(group.dequantized)  # it has been read

    def _prefetch(self, group: PlannedGroup, next_use: float | None) -> bool:
        """Prefetch a group to where the model computes, as `State.prefetch` does."""
        mirror, dequantized = group.mirror, group.dequantized
        if group.home is Tier.DEVICE or (dequantized is not None and dequantized.is_held):
            return True
        if mirror is not None and mirror.is_held and group.is_mirrored:
            return True
        read, sent = self._moved.read, self._moved.to_device
        there = group.home is not Tier.NVME or group.weights.take(next_use, fill=True)
        if there and mirror is not None:
            there = self._send(group, mirror, next_use)
        read, sent = self._moved.read - read, self._moved.to_device - sent
        if read or sent:
            self._fetches.append(Fetch(group.group, read, sent))
        return there

    def _send(self, group: PlannedGroup, mirror: PlannedState, next_use: float | None) -> bool:
        """Send a group to the device; of a stale mirror, what was updated."""
        was_there, sizes = mirror.is_held, group.sizes
        if not mirror.take(next_use):
            return False
        group.is_mirrored = True
        numel = sizes.updated_numel if was_there else sizes.home_numel
        nbytes = sizes.parameters if sizes.dequantized else numel * self._itemsize
        self._moved.to_device += group.used * nbytes
        return True

    def _read_weights(self, group: PlannedGroup) -> None:
        """Count the read of those of a group's parameters that are needed."""
        count = group.updated if self._updates else group.used
        self._moved.read += count * group.sizes.parameters

    # ---------------------------------------------------------------- gradients
    def _gradient(self, group: PlannedGroup, action: Action) -> None:
        sizes, used, gradients = group.sizes, group.used, group.gradients
        group.has_gradients = True
        if self._plan.gpu and group.gradient_home is not Tier.DEVICE:
            # a first gradient leaves in the accumulator's format, a later one in its own
            itemsize = 4 if sizes.summed and action.number == 0 else self._itemsize
            self._moved.to_host += used * sizes.layout.shard_trainable * itemsize
        if group.gradient_home is not Tier.NVME:
            return
        if action.number > 0 and not gradients.is_held:
            self._moved.read += used * sizes.gradients
        # a block that was computed again holds its weights until its gradients are there
        self._lock(gradients, group.weights if group.group in self._recomputed else None)
        were_held = group.weights.is_held
        gradients.take(None)  # for its first part, while no operation has a view
        if len(group.shape.params) > REPEATS and group.group not in self._recomputed:
            # operations follow in the unit; those of a bundle are used one after the other
            if were_held and group.group == self._working and group.alike == 1:
                self._prefetch(group, None)
            self._fetcher.fetch_ahead()
        if gradients.is_held:
            gradients.write()
        else:
            self._write_gradients(group)

    def _write_gradients(self, group: PlannedGroup) -> None:
        self._moved.written += group.gradients.nbytes
        if not group.is_written:
            self.files.move(StateClass.GRADIENTS, group.gradients.nbytes)
            group.is_written = True

    def _drop_gradients(self, group: PlannedGroup) -> None:
        group.gradients.give_back()
        if group.is_written:
            self.files.move(StateClass.GRADIENTS, -group.gradients.nbytes)
            group.is_written = False

    # ---------------------------------------------------------------- updates
    def _update(self, group: PlannedGroup) -> None:
        if not group.has_gradients:
            return  # behind the step before the first one
        gradients, weights = group.gradients, group.weights
        is_speculative = group.group in self._speculative and group.group not in self._pending
        self._lock()
        if is_speculative and not self._keep_old(self._speculative[group.group].memory):
            self._deferred.add(group.group)
            return
        if group.home is Tier.NVME:
            weights.take(weights.next_use(), fill=True)
        self._lock(gradients, weights)  # chunk by chunk, once the weights have their place
        for record in group.records:
            self._record(group, record)
        for kind in group.kinds:  # records displace no states that are locked
            self._update_kind(group, kind)
        self._lock(weights)
        if is_speculative:  # gradients stay for a step that has to be redone
            group.is_used_up = True
        else:
            self._drop_gradients(group)
        self._pending.discard(group.group)
        if not (self._plan.gpu and {kind.tier for kind in group.kinds} <= {Tier.DEVICE}):
            group.is_mirrored = False

    def _keep_old(self, nbytes: int) -> bool:
        """Keep the old version of a state at home in host memory until the step ends. Returns False
        if there is no memory for it."""
        if not nbytes:
            return True
        left = self._trace.cursor.uses_left
        lease = self._host.offer(nbytes, "", StateClass.STAGING, next_use=left)
        if lease is not None:
            self._old.append(lease)
        return lease is not None

    def _record(self, group: PlannedGroup, record: PlannedState) -> None:
        nbytes = record.nbytes // group.alike * group.updated
        if not record.is_held:
            kept = self._keep_records and record.take(record.next_use())
            self._staged |= not kept
            self._moved.read += nbytes
        self._moved.written += nbytes

    def _update_kind(self, group: PlannedGroup, kind: RecordKind) -> None:
        """Move the weights and gradients of chunks whose records are equal."""
        moved, gpu, count = self._moved, self._plan.gpu, group.updated * kind.count
        numel, gradient_itemsize = kind.numel * count, 4 if group.sizes.summed else self._itemsize
        stepped_there = kind.tier is Tier.DEVICE and gpu
        mirrored = group.mirror is not None and group.is_mirrored and group.mirror.is_held
        if group.home is Tier.NVME:
            nbytes = count * pages(kind.numel * self._itemsize)
            if not group.weights.is_held and not (stepped_there and mirrored):
                moved.read += nbytes
            moved.written += nbytes
        if group.gradient_home is Tier.NVME and not group.gradients.is_held:
            moved.read += count * pages(kind.numel * gradient_itemsize)
        if not gpu:
            return
        parameters, gradients = numel * self._itemsize, numel * gradient_itemsize
        at_home, gradients_there = group.home is Tier.DEVICE, group.gradient_home is Tier.DEVICE
        if stepped_there:
            moved.to_device += 0 if at_home or mirrored else parameters
            moved.to_device += 0 if gradients_there else gradients
            moved.to_host += 0 if at_home else parameters
        else:
            moved.to_device += parameters if at_home else 0
            moved.to_host += (parameters if at_home else 0) + (gradients if gradients_there else 0)
