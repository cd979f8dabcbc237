"""States without bytes, for the runtime's own scheduler: its `SlotPool` decides which copies are
kept and its `Fetcher` which parameters are fetched ahead, so that a plan predicts what a run does.

What a `CachedFileState` or a `MirroredState` would move is counted instead (`planned_run`), with
two simplifications: every move ends before the next one begins, and only the current group uses its
copies.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import record_kinds
from offload.planning.step.representatives import Representatives
from offload.swap.io.requests_and_retries import Priority
from offload.swap.states.fetching import Fetcher
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import MADE_HERE, SlotPool
from offload.tiers.arena import Arena
from offload.tiers.errors import TierFullError
from offload.tiers.ledger import StateClass, TierAccount
from offload.tiers.tier import Tier

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
        if self.offset is not None:
            self.tier.arena.free(self.offset)
        self.tier.account.move(self.state_class, -self.nbytes)


class PlannedTier:
    """Answers a `SlotPool` as a `MemoryTier` does, without allocating memory."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(max(0, nbytes))
        self.account = TierAccount(self.arena.nbytes)
        self.lacked_room = False  # for something, at some time

    @property
    def used_nbytes(self) -> int:
        return self.account.used_nbytes

    @property
    def free_nbytes(self) -> int:
        return self.arena.nbytes - self.account.used_nbytes

    def fits(self, nbytes: int) -> bool:
        fits = nbytes <= min(self.free_nbytes, self.arena.largest_free_nbytes)
        self.lacked_room |= not fits
        return fits

    def lease(self, nbytes: int, *, owner: str, state_class: StateClass) -> PlannedLease:
        """A range, possibly in pieces. Raises TierFullError."""
        if nbytes > self.free_nbytes:
            raise TierFullError(
                "host", owner, nbytes, self.free_nbytes, self.arena.nbytes, "plan for less"
            )
        self.account.move(state_class, nbytes)
        return PlannedLease(self, nbytes, state_class, self.arena.allocate(nbytes))


def pool_of(nbytes: int) -> tuple[PlannedTier, SlotPool]:
    """A memory of `nbytes` for copies, and the runtime's pool over it."""
    tier = PlannedTier(nbytes)
    return tier, SlotPool(cast("MemoryTier", tier), threading.RLock())


class PlannedState(Slot):
    """The slot of a state, or of several that are alike, at home elsewhere."""

    def __init__(
        self, name: str, nbytes: int, state_class: StateClass, pool: SlotPool,
        next_use: Callable[[], float],
    ) -> None:  # fmt: skip
        """`next_use` gives the uses from now."""
        super().__init__(name, nbytes, state_class, pool, next_use)
        self.is_locked = False  # in use, as by a view in the runtime
        self.filled: Callable[[], None] = lambda: None  # called when the copy is made
        self.sent: Callable[[], None] = lambda: None  # called when a dirty copy goes home
        self._is_dirty = False

    @property
    def is_held(self) -> bool:
        return self.lease is not None

    # ---------------------------------------------------------------- what the pool asks
    def can_evict(self) -> bool:
        return self.lease is not None and not (self.is_locked or self._is_dirty)

    def evict(self) -> None:
        super().evict()
        self._is_dirty = False

    def write_back(self) -> None:
        if self._is_dirty and not self.is_locked:
            self._is_dirty = False
            self.sent()

    # ---------------------------------------------------------------- what uses it
    def take(self, next_use: float | None, *, fill: bool = False) -> bool:
        """Make the copy and, with `fill`, note that it was read. Where nothing else can go, the
        plan does not fit, and what is needed now only passes through."""
        if self.lease is not None or not self.nbytes:
            return True
        lease = None
        with suppress(TierFullError):
            lease = self.request(next_use)
        if lease is None and next_use is not None:
            return False
        if fill:
            self.filled()
        if lease is not None:
            self.hold(lease)
        return True

    def write(self) -> None:
        """Change the copy: it is newer than its home, and stays until its room is needed."""
        self._is_dirty = True
        self.pool.may_write_back(self)


class PlannedGroup:
    """The states of a group, or of some that it stands for, named as in a run. Its parameters are
    an item of the runtime's `Fetcher`."""

    def __init__(
        self, plan: Plan, experts: Representatives, group: int, fetcher: Fetcher, host: SlotPool,
        device: SlotPool, together: int,
    ) -> None:  # fmt: skip
        """`together` records on nvme are taken as one."""
        self.group, self.index = group, fetcher.next_number
        self.shape, self.sizes = experts.model.groups[group], plan.groups[group]
        self.alike, self.used, self.updated = (
            some[group] for some in (experts.alike, experts.used, experts.updated)
        )
        self.home, self.gradient_home = plan.parameters[group], plan.gradients[group]
        self.in_place = self.home.in_place(gpu=plan.gpu)
        self.on_prefetch: Callable[[float | None], bool] = lambda next_use: True
        self.has_gradients = False  # since the first step
        self.is_used_up = False  # its gradients are read only if the step is redone
        self.is_written = False  # its gradients are on nvme, whether or not a copy is in memory
        self.is_mirrored = False  # its mirror on the device is valid
        self._fetcher = fetcher
        # uses until one of those that it stands for is used again
        self._passes = 1.0 if plan.trains else self.alike / max(1, self.used)
        self._name = "" if self.sizes.name == "(root)" else self.sizes.name
        parameters, dequantized = self.sizes.parameters, self.sizes.dequantized
        self.weights = self._parameters(parameters, host, self._next_use)
        self.mirror = self._parameters(parameters, device, self._next_use) if plan.gpu else None
        self.dequantized = self._parameters(
            dequantized, device if plan.gpu else host, lambda: self._next_use() + MADE_HERE
        ) if dequantized else None  # fmt: skip
        self.gradients = PlannedState(
            f"{self._name} gradients", self.updated * self.sizes.gradients, StateClass.GRADIENTS,
            host, lambda: math.inf if self.is_used_up else self._next_update(),
        )  # fmt: skip
        tiers = plan.records[group]
        self.kinds = list(record_kinds(self.sizes, tiers, plan.chunk_numel))
        numbers = [number for number, tier in enumerate(tiers) if tier is Tier.NVME]
        joined = [numbers[n : n + together] for n in range(0, len(numbers), together)]
        self.records = [
            PlannedState(
                f"{self._name} optimizer chunk {some[0]}",
                self.alike * sum(self.sizes.records[number] for number in some),
                StateClass.OPTIMIZER, host, self._next_update,
            )
            for some in joined
        ]  # fmt: skip

    def _parameters(
        self, nbytes: int, pool: SlotPool, next_use: Callable[[], float]
    ) -> PlannedState:
        name = f"{self._name} parameters"
        return PlannedState(name, self.alike * nbytes, StateClass.PARAMETERS, pool, next_use)

    def _next_use(self) -> float:
        return self._passes * self._fetcher.next_use(self.index)

    def _next_update(self) -> float:
        return self._fetcher.trace.next_cycle_use(self.index) + 0.5

    # ---------------------------------------------------------------- what the fetcher asks
    @property
    def state(self) -> PlannedGroup:
        return self

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        return self.on_prefetch(next_use)

    def note_use(self) -> None:
        """Do nothing: no device reads behind the host."""
