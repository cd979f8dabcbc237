"""Parameters used in device memory, at home in host memory or a file: `MirroredState`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from offload.swap.device.device_slot import DeviceSlot
from offload.swap.device.streams import StreamEvent
from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import SlotUser
from offload.swap.states.state import HostPiece, Snapshot, State, StateOverHome, Undoable
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import OldBytes
from offload.tiers.tier import Residency


class MirroredState(StateOverHome, SlotUser):
    """A home in host memory or a file, mirrored in a slot of device memory while computed with.

    The mirror is valid piece by piece: an update on the device changes both, one on the CPU the
    home alone, and only what the mirror lacks is copied again.
    """

    def __init__(self, home: State, slot: DeviceSlot) -> None:
        """`slot` is as long as `home`, and lent to no other state."""
        super().__init__(home, home.nbytes)
        self.can_snapshot = home.can_snapshot
        self.slot = slot
        slot.user = self
        self._lock = slot.lock
        self._lacking: set[int] = set(range(self.pieces))  # pieces that the slot has not got
        self._updated: set[int] = set()  # changed in the slot, on their way home
        self._home_read: Transfer[None] = Transfer.completed(None)  # by the last copy into the slot

    # ---------------------------------------------------------------- what the pool asks
    def evicted(self) -> None:
        """Let nothing that is in the slot count any more."""
        self._lacking = set(range(self.pieces))
        self._updated.clear()

    def transit(self) -> Callable[[], None] | None:
        return None if self.slot.arrival.done() else self.slot.arrival.wait

    # ---------------------------------------------------------------- compute side
    def _is_whole(self) -> bool:
        return self.slot.lease is not None and not self._lacking

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        if self._is_whole():  # without the lock: no less true than just after it
            return True
        if not self.home.prefetch(next_use=next_use, priority=priority):
            return False
        if not self._take_slot(next_use):
            return False
        if next_use is None or self.home.residency() is not Residency.ARRIVING:
            self._fill()  # else when it is asked for again, or by `tensor`
        return True

    def _take_slot(self, next_use: float | None) -> bool:
        with self._lock:
            if self.slot.lease is not None:
                return True
        lease = self.slot.request(next_use)
        if lease is None:
            return False
        with self._lock:
            self.slot.hold(lease)
        return True

    def _fill(self) -> None:
        """Start copying what the slot lacks."""
        source = self.home.tensor()
        with self._lock:
            if self.slot.lease is not None and self._lacking:
                # The home must keep the bytes in host memory, as they are, until they have left.
                self._home_read = self.slot.fill(source, self._spans(self._lacking))
                self._lacking = set()

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
                if self._is_whole():
                    self.slot.arrival.before_compute()
                    self.slot.note_read()
                    return self.slot.view()
            self.prefetch(next_use=None, priority=Priority.URGENT)

    def blank(self) -> torch.Tensor:
        raise StateError(f"{self.name} is filled from host memory: use host_blank")

    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        with self._lock:
            if not self._is_whole():
                raise StateError(f"{self.name} holds no device memory that could have been written")
            keeps_rest = trainable_only and self.trainable_nbytes < self.nbytes
            changed = slice(self.trainable_nbytes if keeps_rest else self.nbytes)
            source = self.slot.view()[changed]
        if keeps_rest:
            self.home.settle()  # nothing of it may be on its way while it changes
        home = self.home.tensor() if keeps_rest else self.home.blank()
        self.slot.links.to_host.copy(home[changed], source).wait()
        self.home.mark_dirty(trainable_only=trainable_only)

    def residency(self) -> Residency:
        with self._lock:
            if not self._is_whole():
                return Residency.ABSENT
            return Residency.CLEAN if self.slot.has_arrived() else Residency.ARRIVING

    def note_use(self) -> None:
        self.slot.mark_reads()

    # ---------------------------------------------------------------- host side
    def host_tensor(self) -> torch.Tensor:
        self._home_read.wait()
        return self.home.tensor()

    def host_blank(self) -> torch.Tensor:
        self._home_read.wait()
        return self.home.blank()

    def mark_host_dirty(self) -> None:
        self.home.mark_dirty()
        with self._lock:
            self.evicted()

    def host_piece(self, piece: int) -> HostPiece | None:
        at_home = self.home.host_piece(piece)
        return at_home and HostPiece(at_home.view, (*at_home.transfers, self._home_read))

    def mark_piece_dirty(self, piece: int) -> None:
        self.home.mark_piece_dirty(piece)
        self._home_changed(piece)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        self._home_changed(piece)
        return self.home.write_piece(piece, source)

    def _home_changed(self, piece: int) -> None:
        """The home has new bytes of a piece: so has the slot only if they were made there."""
        with self._lock:
            if piece in self._updated:
                self._updated.discard(piece)
            else:
                self._lacking.add(piece)

    def snapshot(self) -> Snapshot:
        self._home_read.wait()
        return self.home.snapshot()

    # ---------------------------------------------------------------- a speculative update
    def undoable(self) -> MirroredState | None:
        return None if self.home.undoable() is None else self

    @property
    def _undoable_home(self) -> Undoable:
        home = self.home.undoable()
        assert home is not None, "asked before"
        return home

    @property
    def old_nbytes(self) -> OldBytes:
        return self._undoable_home.old_nbytes

    def has_views(self) -> bool:
        with self._lock:
            here = self.slot.in_use()
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
                self.evicted()

    # ---------------------------------------------------------------- update on the device
    def device_piece(self, piece: int) -> torch.Tensor | None:
        with self._lock:
            if self.slot.lease is None or piece in self._lacking:
                return None
            self.slot.arrival.before_compute()
            return self.slot.lease.tensor[self.span(piece)]

    def used_device_piece(self, piece: int, until: StreamEvent) -> None:
        with self._lock:
            self._updated.add(piece)

    def settle(self) -> None:
        self.slot.arrival.wait()
        self.home.settle()

    def discard(self) -> None:
        self.slot.give_back()
        self.home.discard()

    def close(self) -> None:
        self.discard()
        self.home.close()
