"""The way back of saved activations: from the window or the disk to backward's device, on demand
and ahead of use."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from offload.swap.activations import DEVICE_NBYTES
from offload.swap.activations.activation_backlog import Backlog
from offload.swap.activations.activation_record import DeviceCopy, SavedPiece, SavedStorage
from offload.swap.device.device_slot import Links
from offload.swap.device.streams import StreamEvent, current_stream
from offload.swap.io.io_backend import Priority
from offload.swap.states.state import HostPiece
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up

_NOT_THERE = (Residency.ABSENT, Residency.ARRIVING)


class CopiesInFlight:
    """Device memory that copies read or fill, until they are done. `lock` guards it."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._copies: deque[tuple[DeviceCopy, int]] = deque()
        self._nbytes = 0

    def hold(self, copy: DeviceCopy, nbytes: int) -> None:
        """The copy's memory, `nbytes` of which it moves, must not be given out again before it is
        done.

        Where too much is held, by more than one copy, the stream of the oldest memory waits for its
        copy: what is made on that stream from here on may then take its place, without this thread
        waiting, which may be any thread.
        """
        with self._lock:
            if not copy.mark.done():
                self._copies.append((copy, nbytes))
                self._nbytes += nbytes
            self.let_go()

    def let_go(self) -> None:
        """Let go of what is done, and of the oldest where too much is held."""
        with self._lock:
            while self._copies:
                oldest, held = self._copies[0]
                if not oldest.mark.done():
                    if self._nbytes <= DEVICE_NBYTES or len(self._copies) == 1:
                        return
                    oldest.mark.before(oldest.stream)
                self._copies.popleft()
                self._nbytes -= held


@dataclass(eq=False, repr=False)
class ActivationReturns:
    """Brings records back. The backlog's lock guards it."""

    _backlog: Backlog
    _links: Links
    _copies: CopiesInFlight
    # gives the living records with smaller numbers, the latest first
    _saved_before: Callable[[int], Iterator[SavedStorage]]
    _in_place: bool
    _ahead_nbytes: int = 0
    _last_fetched: int = 0
    _looked_to: int = 0

    @property
    def _lock(self) -> threading.RLock:
        return self._backlog.lock

    def bring_back(self, record: SavedStorage) -> torch.Tensor:
        """The record's bytes on the device, 1D uint8; waits for them."""
        return self._fetch_here(record) if self._in_place else self._fetch_to_device(record)

    def _fetch_here(self, record: SavedStorage) -> torch.Tensor:
        """The bytes on a CPU: one slot is used as it is; several pieces are copied together."""
        if len(record.pieces) == 1:
            with self._lock:
                self._bring(record.pieces[0], Priority.URGENT)
                look = self._look(record.pieces[0])
            if look is not None:
                return look.wait()
        whole = _aligned(record.nbytes)
        looks, reads = [], []
        for piece in record.pieces:
            target = whole[piece.offset_bytes :]
            with self._lock:
                look = self._look(piece)
                if look is None:
                    reads.append(self._backlog.read_directly(piece, target))
                else:
                    looks.append((target[: piece.nbytes], look))
        for target, look in looks:
            target.copy_(look.wait())
        for read in reads:
            read.wait()
        return whole[: record.nbytes]

    def _look(self, piece: SavedPiece) -> HostPiece | None:
        """A view of the piece's slot, which keeps it there; None if it has none (lock held)."""
        if piece.slot is None:
            return None
        arrivals = () if piece.arrival is None else (piece.arrival,)
        return HostPiece(piece.slot.tensor[: piece.nbytes], arrivals)

    def _bring(self, piece: SavedPiece, priority: Priority) -> bool:
        """Start reading the piece, in place of pieces needed later; False where these do not make
        enough room (lock held)."""
        if piece.slot is None:
            slot = self._backlog.offer(piece.nbytes, below=piece.number)
            if slot is None:
                return False
            self._backlog.read(piece, slot, priority)
        return True

    def _fetch_to_device(self, record: SavedStorage) -> torch.Tensor:
        with self._lock:
            copy = self.take_ahead(record)
            # one of another stream is not used: its memory would be given out again there without
            # a wait for this use
            if copy is not None and copy.stream != current_stream(self._links.device):
                self._copies.hold(copy, record.nbytes)
                copy = None
        if copy is None:
            copy = self._copy_to_device(record)
        copy.mark.before_compute()
        return copy.memory

    def take_ahead(self, record: SavedStorage) -> DeviceCopy | None:
        """The record's bytes on the device, if they were copied ahead of use (lock held)."""
        ahead, record.ahead = record.ahead, None
        if ahead is not None:
            self._ahead_nbytes -= record.nbytes
        return ahead

    def _copy_to_device(self, record: SavedStorage) -> DeviceCopy:
        """Start copying; waits for what has to be read from the disk first."""
        stream = current_stream(self._links.device)
        whole = torch.empty(record.nbytes, dtype=torch.uint8, device=record.device)
        mark = StreamEvent()
        try:
            for piece in record.pieces:
                target = whole[piece.offset_bytes : piece.offset_bytes + piece.nbytes]
                mark = self._copy_piece(piece, target)
        except BaseException:
            self._copies.hold(DeviceCopy(whole, mark, stream), record.nbytes)
            raise
        return DeviceCopy(whole, mark, stream)

    def _copy_piece(self, piece: SavedPiece, target: torch.Tensor) -> StreamEvent:
        look = self._stage(piece)
        if look is None:
            return self._copy_unstaged(piece, target)
        source = look.wait()
        with self._lock:
            piece.copied.before_compute()  # and with it the copy started next
            piece.copied = self._links.to_device.copy(target, source)
            return piece.copied

    def _stage(self, piece: SavedPiece) -> HostPiece | None:
        """The piece in the window, after a wait for room if needed; None if there never is any."""
        with self._lock:
            look = self._look(piece)
        if look is not None:
            return look
        slot = self._backlog.demand(piece.nbytes)
        if slot is None:
            return None
        with self._lock:
            self._backlog.read(piece, slot, Priority.URGENT)
            return self._look(piece)

    def _copy_unstaged(self, piece: SavedPiece, target: torch.Tensor) -> StreamEvent:
        pages = _aligned(piece.nbytes)
        with self._lock:
            read = self._backlog.read_directly(piece, pages)
        read.wait()
        mark = self._links.to_device.copy(target, pages[: piece.nbytes])
        mark.wait()  # nothing else keeps `pages`
        return mark

    def look_ahead(self, number: int) -> None:
        """Bring what was saved before `number`, latest first, as far as there is room (lock held).

        Where backward goes on from where it was, what has been looked at is not looked at again.
        """
        if number > self._last_fetched:
            self._looked_to = number
        self._last_fetched = number
        for record in self._saved_before(min(number, self._looked_to)):
            if not all(self._bring(piece, Priority.NORMAL) for piece in record.pieces):
                break
            self._looked_to = record.number
        if not self._in_place:
            self._copy_ahead(number)

    def _copy_ahead(self, number: int) -> None:
        for record in self._saved_before(number):
            if record.ahead is not None or record.on_device.revive() is not None:
                continue
            there = all(p.residency not in _NOT_THERE for p in record.pieces)
            full = self._ahead_nbytes and self._ahead_nbytes + record.nbytes > DEVICE_NBYTES
            if full or not there:
                return
            try:
                record.ahead = self._copy_to_device(record)
            except torch.OutOfMemoryError:  # when it is needed, there may be room again
                return
            self._ahead_nbytes += record.nbytes


def _aligned(nbytes: int) -> torch.Tensor:
    """1D uint8 of at least `nbytes`, whole pages from a page boundary on, for direct I/O."""
    size = round_up(nbytes, PAGE_NBYTES)
    memory = torch.empty(size + PAGE_NBYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_NBYTES
    return memory[start : start + size]
