"""Parameters used in device memory, at home in host memory or a file: `MirroredState`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from offload.swap.device.fences import Fences, OpenReads
from offload.swap.device.streams import CopyStream, StreamEvent, keeping
from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import CachedState
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import HostPiece, Snapshot, State, Undoable
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import OldBytes, StateClass
from offload.tiers.tier import Residency


@dataclass(frozen=True, slots=True)
class Links:
    """The copy streams between host and device, and the reads under way in the device's memory."""

    to_device: CopyStream
    to_host: CopyStream
    device: torch.device = field(default=torch.device("cpu"))
    fences: Fences = field(default_factory=Fences)
    _on_host: dict[type, tuple[State, torch.Tensor]] = field(init=False, default_factory=dict)

    def lend(self, state: State) -> torch.Tensor:
        """Pageable host memory for a copy of `state`, outside of any budget: of each kind of state
        one such copy is kept, the last."""
        copy = torch.empty(state.nbytes, dtype=torch.uint8)
        self._on_host[type(state)] = state, copy
        return copy

    def take_back(self, state: State) -> torch.Tensor:
        """The memory that was lent for `state`, which the caller changed. StateError if it was lent
        for none, or for another state since."""
        owner, copy = self._on_host.get(type(state), (None, None))
        if owner is not state or copy is None:
            raise StateError(
                f"{state.name}: mark_host_dirty without host_tensor or host_blank before"
            )
        del self._on_host[type(state)]
        return copy

    def close(self) -> None:
        """Wait for every copy."""
        try:
            self.to_device.close()
        finally:
            self.to_host.close()


class DeviceSlotState(CachedState):
    """A state whose slot is device memory: the model's stream reads it, and whatever else works in
    that memory is remembered by marks."""

    _links: Links
    _reads: OpenReads
    _before_write: tuple[StreamEvent, ...]  # what works in the slot until something else is written

    def still_read(self) -> bool:
        return self._slot is not None and self._slot.in_use()

    def read_until(self, mark: StreamEvent) -> None:
        self._before_write = mark.replacing(self._before_write)

    def _marks(self) -> Iterable[StreamEvent]:
        """The events of the work that still uses the slot."""
        return self._before_write

    def evict(self) -> None:
        self._reads.mark_now(self)
        if self._slot is not None:
            self._links.fences.retire(self._slot.extent, self._marks())
        super().evict()

    def note_use(self) -> None:
        with self._lock:
            self._reads.mark()


class MirroredState(DeviceSlotState):
    """A home in host memory or a file, mirrored in a slot of device memory while computed with.

    The mirror is valid piece by piece: an update on the device changes both, one on the CPU the
    home alone, and only what the mirror lacks is copied again.
    """

    def __init__(
        self, home: State, pool: SlotPool, links: Links, reads: OpenReads,
        next_use: Callable[[], float],
    ) -> None:  # fmt: skip
        """`pool` is a pool of device memory; `reads` are the reads of all its slots."""
        super().__init__(
            home, home.name, home.nbytes, home.piece_nbytes, pool, next_use, home.edge_nbytes,
            home.stride_nbytes,
        )  # fmt: skip
        self._links = links
        self._reads = reads
        self._lacking: set[int] = set(range(self.pieces))  # pieces that the slot has not got
        self._arrival = StreamEvent()  # after the last copy of a piece into the slot
        self._before_write: tuple[StreamEvent, ...] = ()
        self._updated: set[int] = set()  # changed in the slot, on their way home
        self._home_read: Transfer[None] = Transfer.completed(None)  # by the last copy into the slot

    # ---------------------------------------------------------------- what the pool asks
    def can_evict(self) -> bool:
        return self._slot is not None and self._arrival.done() and not self._slot.in_use()

    def _marks(self) -> Iterable[StreamEvent]:
        return *self._before_write, self._arrival

    def _forget_arrival(self) -> None:
        self._lacking = set(range(self.pieces))
        self._arrival = StreamEvent()
        self._before_write = ()
        self._updated.clear()

    def transit(self) -> Callable[[], None] | None:
        return None if self._arrival.done() else self._arrival.wait

    # ---------------------------------------------------------------- compute side
    def _is_whole(self) -> bool:
        return self._slot is not None and not self._lacking

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        if self._is_whole():  # without the lock: no less true than just after it
            return True
        if not self._home.prefetch(next_use=next_use, priority=priority):
            return False
        if not self._take_slot(next_use):
            return False
        if next_use is None or self._home.residency() is not Residency.ARRIVING:
            self._fill()  # else when it is asked for again, or by `tensor`
        return True

    def _take_slot(self, next_use: float | None) -> bool:
        with self._lock:
            if self._slot is not None:
                return True
        lease = self._lease_slot(next_use, StateClass.PARAMETERS)
        if lease is None:
            return False
        with self._lock:
            self._slot = lease
            self._before_write = self._links.fences.claim(lease.extent)
            self._pool.register(self)
        return True

    def _fill(self) -> None:
        """Start copying what the slot lacks. No thread waits for fresh memory: a copy waits
        for the last reader of what the memory held before."""
        source = self._home.tensor()
        with self._lock:
            if self._slot is None or not self._lacking:
                return
            self._reads.mark_now(self)
            before, self._before_write = self._before_write, ()
            for span in self._spans(self._lacking):
                target = self._slot.tensor[span]
                self._arrival = self._links.to_device.copy(target, source[span], after=before)
            self._lacking = set()
            # The home must keep the bytes in host memory, as they are, until they have left.
            self._home_read = self._links.to_device.transfer(
                self._arrival, f"{self.name} on its way to the device", keeping(source)
            )

    def _spans(self, pieces: Iterable[int]) -> list[slice]:
        """The bytes of some pieces, neighbours together."""
        spans: list[slice] = []
        for piece in sorted(pieces):
            span = self.span(piece)
            if spans and spans[-1].stop == span.start:
                spans[-1] = slice(spans[-1].start, span.stop)
            else:
                spans.append(span)
        return spans

    def tensor(self) -> torch.Tensor:
        while True:
            with self._lock:
                if self._slot is not None and not self._lacking:
                    self._arrival.before_compute()
                    self._reads.note(self)
                    return self._slot.tensor[: self.nbytes]
            self.prefetch(next_use=None, priority=Priority.URGENT)

    def blank(self) -> torch.Tensor:
        raise StateError(f"{self.name} is filled from host memory: use host_blank")

    def mark_dirty(self, *, to_edge: bool = False) -> None:
        with self._lock:
            if self._slot is None or self._lacking:
                raise StateError(f"{self.name} holds no device memory that could have been written")
            keeps_rest = to_edge and self.edge_nbytes < self.nbytes
            changed = slice(self.edge_nbytes if keeps_rest else self.nbytes)
            source = self._slot.tensor[changed]
        if keeps_rest:
            self._home.settle()  # nothing of it may be on its way while it changes
        home = self._home.tensor() if keeps_rest else self._home.blank()
        self._links.to_host.copy(home[changed], source).wait()
        self._home.mark_dirty(to_edge=to_edge)

    def residency(self) -> Residency:
        with self._lock:
            if not self._is_whole():
                return Residency.ABSENT
            return Residency.CLEAN if self._arrival.done() else Residency.ARRIVING

    # ---------------------------------------------------------------- host side
    def host_tensor(self) -> torch.Tensor:
        self._home_read.wait()
        return self._home.tensor()

    def host_blank(self) -> torch.Tensor:
        self._home_read.wait()
        return self._home.blank()

    def mark_host_dirty(self) -> None:
        self._home.mark_dirty()
        with self._lock:
            self._lacking = set(range(self.pieces))

    def prefetch_host(self, *, next_use: float) -> bool:
        return self._home.prefetch_host(next_use=next_use)

    def host_piece(self, piece: int) -> HostPiece | None:
        found = self._home.host_piece(piece)
        return found and HostPiece(found.view, (*found.transfers, self._home_read))

    def mark_piece_dirty(self, piece: int) -> None:
        self._home.mark_piece_dirty(piece)
        self._home_changed(piece)

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        return self._home.read_piece(piece, destination)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        self._home_changed(piece)
        return self._home.write_piece(piece, source)

    def _home_changed(self, piece: int) -> None:
        """The home has new bytes of a piece: so has the slot only if they were made there."""
        with self._lock:
            if piece in self._updated:
                self._updated.discard(piece)
            else:
                self._lacking.add(piece)

    @property
    def can_snapshot(self) -> bool:  # type: ignore[override]
        return self._home.can_snapshot

    def snapshot(self) -> Snapshot:
        self._home_read.wait()
        return self._home.snapshot()

    # ---------------------------------------------------------------- an update on trial
    def undoable(self) -> MirroredState | None:
        return None if self._home.undoable() is None else self

    @property
    def _undoable_home(self) -> Undoable:
        home = self._home.undoable()
        assert home is not None, "asked before"
        return home

    @property
    def old_nbytes(self) -> OldBytes:
        return self._undoable_home.old_nbytes

    def has_views(self) -> bool:
        with self._lock:
            here = self._slot is not None and self._slot.in_use()
        return here or self._undoable_home.has_views()

    def keep_old(self) -> bool:
        return self._undoable_home.keep_old()

    def drop_old(self) -> None:
        self._undoable_home.drop_old()

    def go_back(self) -> None:
        self._home_read.wait()
        try:
            self._undoable_home.go_back()
        finally:
            with self._lock:  # what was fetched meanwhile is of the new version
                self._lacking = set(range(self.pieces))

    # ---------------------------------------------------------------- update on the device
    def device_piece(self, piece: int) -> torch.Tensor | None:
        with self._lock:
            if self._slot is None or piece in self._lacking:
                return None
            self._arrival.before_compute()
            return self._slot.tensor[self.span(piece)]

    def used_device_piece(self, piece: int, until: StreamEvent) -> None:
        with self._lock:
            self._updated.add(piece)

    # ---------------------------------------------------------------- both
    def settle(self) -> None:
        self._arrival.wait()
        self._home.settle()
