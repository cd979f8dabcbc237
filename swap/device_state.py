"""Parameters computed with in device memory and updated in host memory.

`MirroredState` has its home in host memory or in a file and borrows a slot of device memory;
`DeviceHomeState` lives in device memory and is staged through host memory piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload.swap.io_backend import Priority
from offload.swap.slot_pool import SlotPool
from offload.swap.slot_state import SlotState
from offload.swap.state import HostPiece, MemoryState, State
from offload.swap.streams import CopyMark, CopyStream
from offload.swap.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease
from offload.tiers.residency import Residency
from offload.tiers.units import round_up


@dataclass(frozen=True, slots=True)
class Links:
    """The copy streams between host and device."""

    to_device: CopyStream
    to_host: CopyStream


class MirroredState(SlotState):
    """A home in host memory or a file, mirrored in a slot of device memory while computed with."""

    def __init__(
        self, home: State, pool: SlotPool, links: Links, next_use: Callable[[], float]
    ) -> None:
        """`pool` is one of device memory."""
        super().__init__(home.name, home.nbytes, home.piece_nbytes, pool, next_use)
        self._home = home
        self._links = links
        self._arrival: CopyMark | None = None  # None: the slot's content is not valid

    # ---------------------------------------------------------------- what the pool asks
    def can_drop(self) -> bool:
        arrived = self._arrival is None or self._arrival.done()
        return self._slot is not None and arrived and not self._slot.in_use()

    def _forget_arrival(self) -> None:
        self._arrival = None

    def leave(self) -> None:
        """A mirror is never dirty: `wrote` copies home at once."""

    def transit(self) -> Callable[[], None] | None:
        mark = self._arrival
        return mark.wait if mark is not None and not mark.done() else None

    # ---------------------------------------------------------------- compute side
    def bring(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        with self._lock:
            if self._slot is not None and self._arrival is not None:
                return True
        if not self._home.bring(next_use=next_use, priority=priority):
            return False
        if next_use is not None and self._home.residency() is Residency.ARRIVING:
            return True  # the second leg follows when it is asked for again, or by `tensor`
        if not self._take_slot(next_use):
            return False
        self._fill()
        return True

    def _take_slot(self, next_use: float | None) -> bool:
        with self._lock:
            if self._slot is not None:
                return True
        size = round_up(self.nbytes, PAGE_NBYTES)
        if next_use is None:
            lease: Lease | None = self._pool.demand(size, self.name, StateClass.PARAMETERS)
        else:
            lease = self._pool.offer(size, self.name, StateClass.PARAMETERS, next_use=next_use)
        if lease is None:
            return False
        with self._lock:
            self._slot = lease
            self._pool.register(self)
        return True

    def _fill(self) -> None:
        source = self._home.tensor()
        with self._lock:
            if self._slot is not None and self._arrival is None:
                target = self._slot.tensor[: self.nbytes]
                self._arrival = self._links.to_device.copy(target, source)

    def tensor(self) -> torch.Tensor:
        while True:
            self.bring(next_use=None, priority=Priority.URGENT)
            with self._lock:
                if self._slot is not None and self._arrival is not None:
                    self._arrival.before_compute()
                    return self._slot.tensor[: self.nbytes]

    def blank(self) -> torch.Tensor:
        raise StateError(f"{self.name} is filled from host memory: use host_blank")

    def wrote(self) -> None:
        with self._lock:
            if self._slot is None or self._arrival is None:
                raise StateError(f"{self.name} holds no device memory that could have been written")
            source = self._slot.tensor[: self.nbytes]
        self._links.to_host.copy(self._home.blank(), source).wait()
        self._home.wrote()

    def residency(self) -> Residency:
        with self._lock:
            if self._slot is None or self._arrival is None:
                return Residency.ABSENT
            return Residency.CLEAN if self._arrival.done() else Residency.ARRIVING

    # ---------------------------------------------------------------- host side
    def host_tensor(self) -> torch.Tensor:
        return self._home.tensor()

    def host_blank(self) -> torch.Tensor:
        return self._home.blank()

    def host_wrote(self) -> None:
        self._home.wrote()
        self._stale()

    def _stale(self) -> None:
        """The home is newer than the mirror."""
        with self._lock:
            self._arrival = None

    def bring_host(self, *, next_use: float) -> bool:
        return self._home.bring_host(next_use=next_use)

    def host_piece(self, piece: int) -> HostPiece | None:
        return self._home.host_piece(piece)

    def wrote_piece(self, piece: int) -> None:
        self._home.wrote_piece(piece)
        self._stale()

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        return self._home.read_piece(piece, destination)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        self._stale()
        return self._home.write_piece(piece, source)

    def discard(self) -> None:
        with self._lock:
            if self._slot is not None:
                self.drop()
        self._home.discard()

    def settle(self) -> None:
        self._home.settle()

    def close(self) -> None:
        self.discard()
        self._home.close()


class DeviceHomeState(MemoryState):
    """Device memory is the home; the update's pieces are copied out and back."""

    def __init__(
        self, name: str, nbytes: int, piece_nbytes: int, lease: Lease, links: Links
    ) -> None:
        super().__init__(name, nbytes, piece_nbytes, lease)
        self._links = links
        self._on_host: torch.Tensor | None = None  # between `host_blank` and `host_wrote`

    def host_tensor(self) -> torch.Tensor:
        copy = torch.empty(self.nbytes, dtype=torch.uint8)
        self._links.to_host.copy(copy, self.tensor()).wait()
        self._on_host = copy
        return copy

    def host_blank(self) -> torch.Tensor:
        self._on_host = torch.empty(self.nbytes, dtype=torch.uint8)
        return self._on_host

    def host_wrote(self) -> None:
        if self._on_host is None:
            raise StateError(f"{self.name}: host_wrote without host_tensor or host_blank before")
        self._links.to_device.copy(self.tensor(), self._on_host).wait()
        self._on_host = None

    def host_piece(self, piece: int) -> HostPiece | None:
        return None

    def wrote_piece(self, piece: int) -> None:
        raise StateError(f"{self.name} is staged: use write_piece")

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        target = destination[: span.stop - span.start]
        self._links.to_host.copy(target, self._lease.tensor[span]).wait()
        return Transfer.completed(None)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        self._links.to_device.copy(
            self._lease.tensor[span], source[: span.stop - span.start]
        ).wait()
        return Transfer.completed(None)
