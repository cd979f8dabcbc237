"""Parameters of which this rank owns a shard: gathered while they are computed with
(`GatheredState`), or whole all the time and refreshed after each update (`ReplicatedState`).

On a GPU a gather is a collective: all ranks begin the same ones in the same order. So the model's
thread decides which groups are gathered and which copies are evicted for them, from the order of
uses and a limit in bytes that all ranks agree on, never from how much memory is free. On CPUs, each
rank asks the others for their shards (`shard_service.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch

from offload.swap.device.fences import Fences
from offload.swap.device.streams import StreamEvent, mark_here
from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State, StateOverHome
from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import Residency
from offload.zero.groups.group import RankCopies, Update
from offload.zero.ranks.collectives import Collectives, Fetch, named
from offload.zero.ranks.shard_service import ShardService
from offload.zero.ranks.sharding import Part

_SOON_S = 1.0  # between two statements of a rank, also on a busy machine


class SharedState(StateOverHome, RankCopies):
    """The base of both: the update side works on this rank's own part in `home`, piece by piece."""

    def __init__(
        self, home: State, part: Part, itemsize: int, gatherer: Gatherer,
        update: Callable[[], Transfer[None] | None], first_piece: int = 0,
    ) -> None:  # fmt: skip
        """`part` is this rank's, whose pieces begin with `first_piece` in `home`; readers wait for
        `update`."""
        super().__init__(home, part.layout.numel * itemsize, first_piece)
        # bytes of the whole buffer: this rank's parts of both, and where frozen elements begin
        self._trained, self._frozen = (
            slice(each.start * itemsize, each.stop * itemsize)
            for each in (part.trainable, part.frozen)
        )
        self._cut = part.layout.numel_trainable * itemsize
        self._gatherer = gatherer
        self._update = update
        self._arrival: Transfer[StreamEvent] | None = None

    @property
    def is_arriving(self) -> bool:
        return self._arrival is not None and not self._arrival.done()

    def _submit(self, gather: Callable[[], StreamEvent]) -> None:
        what = f"the all-gather of {named(self.name)}"
        self._arrival = self._gatherer.order.submit(what, gather)

    def _all_gather(
        self, whole: torch.Tensor, trained: torch.Tensor | None, frozen: torch.Tensor | None,
        fetch: Fetch | None = None,
    ) -> StreamEvent:  # fmt: skip
        """Gather all ranks' parts into `whole`, on the gathering thread; those of a kind of which
        this rank's part is None stay as they are. `fetch`: see `Collectives.gather`."""
        gather = self._gatherer.collectives.gather
        if trained is not None and self._cut:
            gather(whole[: self._cut], trained, self.name, fetch and partial(fetch, frozen=False))
        if frozen is not None and self.nbytes > self._cut:
            gather(whole[self._cut :], frozen, self.name, fetch and partial(fetch, frozen=True))
        return mark_here(self._gatherer.device)

    def _await_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.wait().before_compute()

    def _end_gathering(self) -> None:
        """Let no gather be in progress: `home` is about to lose its bytes."""
        self._await_arrival()

    def discard(self) -> None:
        self._end_gathering()
        self.home.discard()

    def settle(self) -> None:
        self._await_arrival()
        self.home.settle()

    def close(self) -> None:
        self._end_gathering()
        self.home.close()


class Gatherer:
    """Memory for whole parameters, and the order in which they are gathered.

    When the room is full, the least recently used copy that no module holds is evicted."""

    def __init__(
        self, collectives: Collectives, pool: SlotPool, room_nbytes: int, device: torch.device,
        fences: Fences, service: ShardService | None = None,
    ) -> None:  # fmt: skip
        """`pool` is of the memory that the model computes in; `room_nbytes` is the same on every
        rank. `service`: of ranks that gather apart; None where all gather together."""
        self.collectives = collectives
        self.device = device
        self.order = OrderedWork("offload-gather", device)
        self._pool = pool
        self._room = room_nbytes
        self._fences = fences
        self._gathered: dict[int, GatheredState] = {}  # the least recently used first
        self._held_nbytes = 0
        self.service = service

    def advance(self) -> None:
        """Note that a step or a write is complete here (see `ShardService`)."""
        if self.service is not None:
            self.service.advance()

    def gather(self, state: GatheredState) -> None:
        """Begin to gather `state`, which is not gathered."""
        self._make_room(state)
        self._begin(state)

    def _begin(self, state: GatheredState) -> None:
        lease = self._pool.demand(state.nbytes, f"{state.name}, gathered", StateClass.STAGING)
        self._held_nbytes += state.nbytes
        self._gathered[id(state)] = state
        state.begin(lease, self._fences.claim(lease.extent))

    def used(self, state: GatheredState) -> None:
        self._gathered[id(state)] = self._gathered.pop(id(state))

    def expect(self, state: GatheredState, now: GatheredState) -> None:
        """Begin to gather `state`, needed next, if there is room beside what is needed `now`."""
        if state.is_gathered:
            return
        self._make_room(state, now)
        if self._held_nbytes + state.nbytes <= self._room:
            self._begin(state)

    def begin_pass(self) -> None:
        """Begin a pass of the model, in the same state as every pass."""
        for state in list(self._gathered.values()):
            if not state.is_held():
                self.give_up(state)

    def give_up(self, state: GatheredState) -> None:
        """Forget a gathered copy; its memory is free once no tensor views it."""
        del self._gathered[id(state)]
        self._held_nbytes -= state.nbytes
        lease = state.end()
        self._fences.retire(lease.extent, (mark_here(self.device),))
        with self._pool.lock:
            if lease.in_use():
                what = lease.owner, lease.nbytes, lease.state_class
                Slot(*what, self._pool, lambda: math.inf).hold(lease)
            else:
                lease.free()

    def _make_room(self, state: GatheredState, now: GatheredState | None = None) -> None:
        for other in list(self._gathered.values()):
            if self._held_nbytes + state.nbytes <= self._room:
                return
            if other is not now and not other.is_held():
                self.give_up(other)


class GatheredState(SharedState):
    """A shard at home somewhere (`home`), gathered whole where the model computes."""

    def __init__(
        self, home: State, part: Part, itemsize: int, gatherer: Gatherer,
        update: Callable[[], Transfer[None] | None], is_held: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`is_held` returns whether a module has entered the group."""
        super().__init__(home, part, itemsize, gatherer, update)
        self.is_held = is_held
        self._own_cut = len(part.trainable) * itemsize  # where frozen elements begin in `home`
        self._lease: Lease | None = None
        self._ends_unheld = False  # evict the copy when no module holds it any more
        self._torn = False  # the copy has shards of different moments, and must not be used
        self._lending = False  # the serving thread may read the shard
        self._last: tuple[int, Update | None] = -1, None  # update, with the phase it was counted in
        self._number = -1 if gatherer.service is None else gatherer.service.add(self)

    @property
    def is_gathered(self) -> bool:
        return self._lease is not None

    # ---------------------------------------------------------------- for the gatherer
    def begin(self, lease: Lease, before: tuple[StreamEvent, ...]) -> None:
        self._lease = lease
        whole, update, service = lease.tensor[: self.nbytes], self._update(), self._gatherer.service
        self._torn = False
        fetch: Fetch | None = None
        if service is not None:
            fetch = partial(self._fetch, service, service.phase, self._is_ahead)
        else:
            self._gatherer.collectives.watch.follow(f"the all-gather of {named(self.name)}")
        self._submit(partial(self._gather, whole, update, before, fetch))

    def _gather(
        self, whole: torch.Tensor, update: Transfer[None] | None, before: tuple[StreamEvent, ...],
        fetch: Fetch | None,
    ) -> StreamEvent:  # fmt: skip
        """Gather all shards, on the gathering thread."""
        if update is not None:
            update.wait()
        for mark in before:
            mark.before_compute()
        own = self.home.tensor()
        return self._all_gather(whole, own[: self._own_cut], own[self._own_cut :], fetch)

    # ---------------------------------------------------------------- for the service
    @property
    def is_arriving(self) -> bool:
        return super().is_arriving or self._lending

    @property
    def _phase(self) -> int:
        return -2 if self._gatherer.service is None else self._gatherer.service.phase

    @property
    def _is_ahead(self) -> bool:
        """Whether an update in backward counts already, before the step that makes it."""
        return self._last[0] == self._phase

    def _fetch(
        self, service: ShardService, phase: int, ahead: bool, whole: torch.Tensor, limit: timedelta,
        *, frozen: bool,
    ) -> None:  # fmt: skip
        fits = service.fetch(self._number, phase, ahead, whole, limit, frozen=frozen)
        self._torn |= not fits

    @contextmanager
    def lend(self, *, frozen: bool, ahead: bool) -> Iterator[torch.Tensor]:
        self._lending = True  # no speculative update begins any more
        try:
            update = self._update()  # after undoing a speculative one; before `_last` is read
            deadline = time.monotonic() + _SOON_S
            while ahead and not self._is_ahead and time.monotonic() < deadline:
                time.sleep(0.002)  # the other rank's update was made: so this one's is due, if ever
            _, last = self._last
            if ahead and last is not None:
                last.ready.wait()
            # an update in backward changes nothing before the rank that asks has reduced gradients
            elif update is not None and not (
                self._is_ahead and last is not None and update is last.ready
            ):
                update.wait()
            own = self.home.tensor()
            yield own[self._own_cut :] if frozen else own[: self._own_cut]
        finally:
            self._lending = False

    def had(self, phase: int, *, ahead: bool) -> bool:
        if phase != self._phase:
            return False
        _, last = self._last
        return self._is_ahead if ahead else not (self._is_ahead and last is not None and last.begun)

    def end(self) -> Lease:
        """Forget the copy, and return its memory."""
        assert self._lease is not None, "begun before"
        assert self._arrival is not None, "begun before"
        self._arrival.wait()
        lease, self._lease, self._arrival = self._lease, None, None
        self._ends_unheld = False
        return lease

    def _copy(self) -> torch.Tensor:
        assert self._lease is not None, "begun before"
        return self._lease.tensor[: self.nbytes]

    def _end_gathering(self) -> None:
        self._drop()

    # ---------------------------------------------------------------- compute side
    def invalidate_gathered(self, update: Update | None = None) -> None:
        self._last = (-1 if update is None else self._phase), update
        self._drop()

    def _drop(self) -> None:
        if self.is_gathered:
            self._gatherer.give_up(self)

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Prefetch this rank's shard alone: reads may come in any order."""
        return self.is_gathered or self.home.prefetch(next_use=next_use, priority=priority)

    def tensor(self) -> torch.Tensor:
        for _ in range(2):  # a copy that was prefetched across a step is gathered again
            if self._lease is None:
                self._gatherer.gather(self)
            self._await_arrival()
            if not self._torn:
                return self._copy()
            self._drop()
        raise StateError(
            f"{self.name}: other ranks have values of another moment. With optimizer.in_backward, "
            "ranks that use other modules than each other update them at different times: read "
            "them before backward or after step(), or set optimizer.in_backward: false. Otherwise "
            "a rank alone wrote to parameters"
        )

    def blank(self) -> torch.Tensor:
        raise StateError(f"{self.name} is filled shard by shard: use host_blank")

    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        """Store this rank's part of the whole copy, which the caller changed."""
        whole, own = self._copy(), self.home.tensor()
        own[: self._own_cut] = whole[self._trained]
        own[self._own_cut :] = whole[self._frozen]
        self.home.mark_dirty()

    def overwritten(self) -> None:
        self._gatherer.advance()
        if self.is_held():  # by the writer and by enclosing holders
            self._ends_unheld = True
        else:
            self._drop()

    def on_last_release(self) -> None:
        if self.is_gathered and self._ends_unheld:
            self._drop()

    def residency(self) -> Residency:
        return Residency.CLEAN if self.is_gathered else self.home.residency()

    def mark_host_dirty(self) -> None:
        self._drop()
        self.home.mark_host_dirty()
        self._gatherer.advance()


class ReplicatedState(SharedState):
    """Whole on every rank, in the tier of `home`. Each rank updates its own part; the others' parts
    are gathered before the next use."""

    def __init__(
        self, home: State, part: Part, itemsize: int, gatherer: Gatherer,
        update: Callable[[], Transfer[None] | None], rank: int,
    ) -> None:  # fmt: skip
        super().__init__(home, part, itemsize, gatherer, update, rank * home.pieces_per_stride)
        self.in_place, self.at_home_on_device = home.in_place, home.at_home_on_device
        self._outdated = self._frozen_outdated = False

    @property
    def is_outdated(self) -> bool:
        return self._outdated or self._frozen_outdated

    # ---------------------------------------------------------------- compute side
    def invalidate_gathered(self, update: Update | None = None) -> None:
        self._outdated = True

    def refresh(self) -> None:
        if not self.is_outdated:
            return
        run = partial(self._refresh, self._update(), self._outdated, self._frozen_outdated)
        self._outdated = self._frozen_outdated = False
        self._submit(run)

    def _refresh(self, update: Transfer[None] | None, trainable: bool, frozen: bool) -> StreamEvent:
        """Gather what other ranks have changed, on the gathering thread."""
        if update is not None:
            update.wait()
        whole = self.home.tensor()
        mark = self._all_gather(
            whole, whole[self._trained] if trainable else None,
            whole[self._frozen] if frozen else None,
        )  # fmt: skip
        self.home.mark_dirty(trainable_only=not frozen)
        del whole  # not before: a copy without views may be dropped
        return mark

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        if self.is_arriving:
            return True  # it is fetched where it is gathered
        return self.home.prefetch(next_use=next_use, priority=priority)

    def tensor(self) -> torch.Tensor:
        self.refresh()
        self._await_arrival()
        return self.home.tensor()

    def blank(self) -> torch.Tensor:
        return self.home.blank()

    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        self.home.mark_dirty(trainable_only=trainable_only)

    def host_tensor(self) -> torch.Tensor:
        self._await_arrival()
        return super().host_tensor()

    def mark_host_dirty(self) -> None:
        """Note that the host wrote this rank's part alone."""
        self.home.mark_host_dirty()
        self.overwritten()

    def overwritten(self) -> None:
        self._outdated = self._frozen_outdated = True
