"""States without bytes, for the runtime's own scheduler: its `SlotPool` decides which copies are
kept and its `Fetcher` which parameters are fetched ahead, so that a plan predicts what a run does.

What a `FileState` or a `MirroredState` would move is counted instead (`planned_run`), with two
simplifications: every move ends before the next one begins, and only the current group uses its
copies.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from offload.planning.plan.kv_plan import KVHeld
from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import GroupBytes, RecordKind, record_kinds
from offload.planning.step.representatives import Representatives
from offload.swap.io.io_request import Priority
from offload.swap.states.slot_pool import MADE_HERE, SlotPool
from offload.tiers.arena import Arena
from offload.tiers.errors import TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.groups.fetching import Fetcher

if TYPE_CHECKING:
    from offload.tiers.memory_tier import MemoryTier


@dataclass(slots=True)
class PlannedLease:
    """A range of a `PlannedTier`."""

    tier: PlannedTier
    nbytes: int
    state_class: StateClass
    offset: int | None  # None: in pieces

    def free(self) -> None:
        self.tier.give_back(self)


class PlannedTier:
    """What a `SlotPool` asks of a `MemoryTier`, without memory."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(max(0, nbytes))
        self.used_nbytes = self.peak_nbytes = 0
        self._used = dict.fromkeys(StateClass, 0)
        self.peak = dict(self._used)  # bytes by class, when all together were most

    @property
    def free_nbytes(self) -> int:
        return self.arena.nbytes - self.used_nbytes

    def fits(self, nbytes: int) -> bool:
        return nbytes <= min(self.free_nbytes, self.arena.largest_free_nbytes)

    def lease(self, nbytes: int, *, owner: str, state_class: StateClass) -> PlannedLease:
        """A range, possibly in pieces. Raises TierFullError."""
        if nbytes > self.free_nbytes:
            raise TierFullError(
                Tier.HOST, owner, nbytes, self.free_nbytes, self.arena.nbytes, "plan for less"
            )
        lease = PlannedLease(self, nbytes, state_class, self.arena.allocate(nbytes))
        self._used[state_class] += nbytes
        self.used_nbytes += nbytes
        if self.used_nbytes > self.peak_nbytes:
            self.peak_nbytes, self.peak = self.used_nbytes, dict(self._used)
        return lease

    def give_back(self, lease: PlannedLease) -> None:
        if lease.offset is not None:
            self.arena.free(lease.offset)
        self._used[lease.state_class] -= lease.nbytes
        self.used_nbytes -= lease.nbytes


def pool_of(nbytes: int) -> tuple[PlannedTier, SlotPool]:
    """A memory of `nbytes` for copies, and the runtime's pool over it."""
    tier = PlannedTier(nbytes)
    return tier, SlotPool(cast("MemoryTier", tier), threading.RLock())


class PlannedState:
    """A copy of a state in a pool, or of several that are alike, at home elsewhere."""

    def __init__(
        self, name: str, nbytes: int, state_class: StateClass, pool: SlotPool,
        next_use: Callable[[], float], chunks: int = 1,
    ) -> None:  # fmt: skip
        """`next_use` gives the uses from now; `chunks` is the number of pieces in a file."""
        self.name, self.nbytes, self.chunks = name, nbytes, chunks
        self.state_class, self.next_use = state_class, next_use
        self.is_locked = False  # in use, as by a view in the runtime
        self.filled: Callable[[], None] = lambda: None  # called when the copy is made
        self.sent: Callable[[], None] = lambda: None  # called when a dirty copy goes home
        self._pool = pool
        self._lease: PlannedLease | None = None
        self._is_dirty = False

    @property
    def is_held(self) -> bool:
        return self._lease is not None

    @property
    def held_nbytes(self) -> int:
        return self.nbytes if self._lease is not None else 0

    # ---------------------------------------------------------------- what the pool asks
    def can_evict(self) -> bool:
        return self._lease is not None and not (self.is_locked or self._is_dirty)

    def evict(self) -> None:
        """Give the copy up, if there is one."""
        if self._lease is not None:
            self._pool.unregister(self)
            self._lease.free()
            self._lease = None
            self._is_dirty = False

    def write_back(self) -> None:
        if self._is_dirty and not self.is_locked:
            self._is_dirty = False
            self.sent()

    def transit(self) -> Callable[[], None] | None:
        return None

    # ---------------------------------------------------------------- what uses it
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Make the copy, as `State.prefetch` does."""
        return self.bring_at(next_use)

    def bring_at(self, next_use: float | None) -> bool:
        return self.take(next_use, fill=True)

    def take(self, next_use: float | None, *, fill: bool) -> bool:
        """Make the copy and, with `fill`, note that it was read. Where nothing else can go, the
        plan does not fit, and what is needed now only passes through."""
        if self._lease is not None or not self.nbytes:
            return True
        lease = None
        if next_use is not None:
            lease = self._pool.offer(self.nbytes, self.name, self.state_class, next_use=next_use)
            if lease is None:
                return False
        else:
            with suppress(TierFullError):
                lease = self._pool.demand(self.nbytes, self.name, self.state_class)
        if fill:
            self.filled()
        if lease is not None:
            self._lease = cast("PlannedLease", lease)
            self._pool.register(self)
        return True

    def write(self) -> None:
        """Change the copy: it is newer than its home, and stays until its room is needed."""
        self._is_dirty = True
        self._pool.may_write_back(self)


class PlannedGroup:
    """A group's parameters, or a layer's cache: an item of the runtime's `Fetcher`."""

    def __init__(self, index: int, *, in_place: bool) -> None:
        self.index, self.in_place = index, in_place
        self.bring_at: Callable[[float | None], bool] = lambda next_use: True

    @property
    def state(self) -> PlannedGroup:
        return self

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        return self.bring_at(next_use)

    def note_use(self) -> None:
        """Do nothing: bytes are counted as they move."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A layer's cache in the trace, in bytes of one pass."""

    item: PlannedGroup
    group: int  # of its block
    pages: PlannedState  # on nvme
    elsewhere_nbytes: int  # that are not where the model computes
    leaving_nbytes: int  # added, on their way from there
    written_nbytes: int


class PlannedStates:
    """The states of a plan's groups, named as in a run, with the runtime's fetcher and pools."""

    def __init__(
        self, plan: Plan, experts: Representatives, room_nbytes: int, kv: KVHeld | None,
        most_chunks: int,
    ) -> None:  # fmt: skip
        """`room_nbytes` is the host memory for copies; of more than `most_chunks` records on nvme
        some are taken together."""
        self._plan, self._experts = plan, experts
        self.fetcher = Fetcher(plan.prefetch)
        self.memory, self.host = pool_of(room_nbytes)
        self.host.uses_left = lambda: self.fetcher.trace.uses_left
        room = plan.budgets[Tier.DEVICE] - plan.total(Tier.DEVICE)
        _, self._device = pool_of(room if plan.gpu else 0)
        self.items: dict[int, PlannedGroup] = {}
        self.numbered: list[int] = []  # the groups by their items' numbers; a cache has -1
        self.weights: dict[int, PlannedState] = {}
        self.mirrors: dict[int, PlannedState] = {}  # on a GPU
        self.decoded: dict[int, PlannedState] = {}  # where the home has codes
        self.gradients: dict[int, PlannedState] = {}
        self.used_up: set[int] = set()  # groups whose gradients are read only if a step is redone
        self.records: dict[int, list[PlannedState]] = {}  # on nvme
        self.kinds: dict[int, list[RecordKind]] = {}
        on_nvme = sum(tiers.count(Tier.NVME) for tiers in plan.records)
        together = max(1, -(-on_nvme // most_chunks))
        for index in experts.alike:
            self._add_parameters(index)
            self._add_trained(index, together)
        self.tables: dict[str, list[PlannedGroup]] = defaultdict(list)
        for unit in experts.model.units:
            if unit.table:
                self.tables[unit.table] += [self.items[group] for group in unit.groups]
        self.seats = {seat.group: seat for seat in self._all_seats(kv)}

    def _add_item(self, group: int, table: str = "", *, in_place: bool) -> PlannedGroup:
        item = PlannedGroup(self.fetcher.next_number, in_place=in_place)
        self.numbered.append(group)
        self.fetcher.add(item, table)
        return item

    def _add_parameters(self, index: int) -> None:
        plan, alike, group = self._plan, self._experts.alike[index], self._plan.groups[index]
        # uses until one of those that it stands for is used again
        passes = 1.0 if plan.trains else alike / max(1, self._experts.used[index])
        number = self.fetcher.next_number

        def next_use() -> float:
            return passes * self.fetcher.next_use(number)

        def state(nbytes: int, pool: SlotPool, next_use: Callable[[], float]) -> PlannedState:
            name = f"{_name_of(group)} parameters"
            return PlannedState(name, alike * nbytes, StateClass.PARAMETERS, pool, next_use)

        self.weights[index] = state(group.parameters, self.host, next_use)
        if plan.gpu:
            self.mirrors[index] = state(group.parameters, self._device, next_use)
        if group.decoded:
            pool = self._device if plan.gpu else self.host
            self.decoded[index] = state(group.decoded, pool, lambda: next_use() + MADE_HERE)
        computing = {Tier.DEVICE} if plan.gpu else {Tier.DEVICE, Tier.HOST}
        self.items[index] = self._add_item(
            index, self._experts.model.groups[index].table,
            in_place=plan.parameters[index] in computing,
        )  # fmt: skip

    def _add_trained(self, index: int, together: int) -> None:
        """Add gradients, and records with `together` chunks as one."""
        group, tiers = self._plan.groups[index], self._plan.records[index]
        name, number = _name_of(group), self.items[index].index

        def next_update() -> float:
            return self.fetcher.trace.next_cycle_use(number) + 0.5

        def next_read() -> float:
            return math.inf if index in self.used_up else next_update()

        self.gradients[index] = PlannedState(
            f"{name} gradients", self._experts.updated[index] * group.gradients,
            StateClass.GRADIENTS, self.host, next_read,
        )  # fmt: skip
        numbers = [n for n, tier in enumerate(tiers) if tier is Tier.NVME]
        joined = [numbers[n : n + together] for n in range(0, len(numbers), together)]
        self.records[index] = [
            PlannedState(
                f"{name} optimizer chunk {some[0]}",
                self._experts.alike[index] * sum(group.records[n] for n in some),
                StateClass.OPTIMIZER, self.host, next_update, len(some),
            )
            for some in joined
        ]  # fmt: skip
        self.kinds[index] = list(record_kinds(group, tiers, self._plan.chunk_numel))

    def _all_seats(self, kv: KVHeld | None) -> Iterator[Seat]:
        """The caches, distributed over the blocks in order."""
        units = self._experts.model.units
        blocks = [unit.groups[0] for unit in units if unit.repeated and unit.groups]
        if kv is None or not blocks or not kv.read:
            return
        count, share = len(kv.read), len(blocks)
        for index, block in enumerate(blocks):
            layers = slice(index * count // share, (index + 1) * count // share)
            read = sum(kv.read[layers])
            item = self._add_item(-1, in_place=not read)
            pages = PlannedState(
                f"cache {index}", read, StateClass.KV, self.host,
                partial(self.fetcher.trace.next_use, item.index),
            )  # fmt: skip
            item.bring_at = pages.bring_at
            yield Seat(
                item, block, pages, sum(kv.crossing[layers]), kv.leaving // share,
                kv.written // share,
            )  # fmt: skip


def _name_of(group: GroupBytes) -> str:
    return "" if group.name == "(root)" else group.name
