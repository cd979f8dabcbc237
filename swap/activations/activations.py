"""Saved activations away from the device between forward and backward.

    keep           its storage goes to the window, and on to the disk (see the backlog); it travels
                   once, however many views of it are saved
    Parked.tensor  a tensor of the same shape, over one storage for all views:
                     still on the device   that storage itself
                     in the window         the slot, in place (CPU) or copied (GPU)
                     on the disk           read back; what was saved before it is read ahead, as
                                           far as the window goes

Every byte dies with the last thing that was packed from it, also where no backward ever comes.
"""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from offload.swap.activations import MIN_NBYTES, TRIM_NBYTES, WHOLE
from offload.swap.activations.activation_backlog import Backlog
from offload.swap.activations.activation_record import (
    DeviceCopy,
    SavedPiece,
    SavedStorage,
    Token,
    WeakMemory,
    bytes_of,
)
from offload.swap.activations.activation_returns import ActivationReturns, CopiesInFlight
from offload.swap.activations.activation_window import ActivationWindow
from offload.swap.device.device_slot import Links
from offload.swap.device.streams import current_stream
from offload.swap.io.block_store import BlockStore
from offload.swap.threads.shield import defer_signals
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload")


@dataclass(frozen=True, slots=True)
class Parked:
    """A saved tensor that is away."""

    _tier: ActivationTier
    _token: Token
    _dtype: torch.dtype
    _shape: torch.Size
    _stride: tuple[int, ...]
    _offset_bytes: int

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved, without a graph. Waits for its arrival."""
        flat = self._tier.fetch(self._token)
        offset = (int(flat.storage_offset()) + self._offset_bytes) // self._dtype.itemsize
        empty = torch.empty(0, dtype=self._dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), offset, self._shape, self._stride)


class ActivationTier:
    """Takes over the storages of saved tensors. Thread-safe."""

    def __init__(
        self, window: ActivationWindow, store: BlockStore | None, disk_nbytes: int, links: Links,
        lock: threading.RLock, *, device: torch.device, in_place: bool,
        min_nbytes: int | None = None, trim: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Takes over tensors saved on `device`. `in_place`: that is host memory, a slot can be used
        as it is. Without a `store` the window is where activations live, otherwise where they pass
        through; at most `disk_nbytes` are stored at a time. `trim` gives memory that was freed back
        to the system: glibc cannot use the hole of an aligned block for another one of its size.
        """
        self._taken_nbytes = self._stayed_nbytes = 0  # since the start: taken over; without room
        self._backlog = Backlog(window, store, disk_nbytes, lock)
        self._window = window
        self._links = links
        self._lock = lock
        self._device = device
        self._min_nbytes = MIN_NBYTES if min_nbytes is None else min_nbytes
        self._records: dict[int, SavedStorage] = {}
        self._order: list[int] = []  # numbers of living records, rising
        self._next_number = 0
        self._of_storage: dict[int, list[SavedStorage]] = {}  # records of storages that are alive
        self._dead: deque[int] = deque()
        self._spared: dict[int, WeakMemory] = {}
        self._copies = CopiesInFlight(lock)
        before = self._saved_before
        self._returns = ActivationReturns(self._backlog, links, self._copies, before, in_place)
        self._said_full = False
        self._trim = trim
        self._untrimmed_nbytes = 0

    def spare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of `tensors` alone, until called again: other code keeps them."""
        spared = {}
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.nbytes >= self._min_nbytes:
                weak = WeakMemory(bytes_of(tensor.untyped_storage(), tensor.device, 0, 0))
                spared[weak.key] = weak
        self._spared = spared

    @defer_signals
    def keep(self, tensor: torch.Tensor) -> Parked | None:
        """Take over the storage of `tensor`; returns None if it stays where it is.

        Waits for writes under way if the window is full. Raises StorageError if one failed.
        """
        if not self._is_worth_it(tensor):
            return None
        storage = tensor.untyped_storage()
        start, stop = span_of(tensor)
        if stop - start < self._min_nbytes or storage._cdata in self._spared:
            return None
        self._bury_dead()
        kept = self._known(storage, start, stop, tensor)
        if kept is None:
            if storage.nbytes() <= WHOLE * (stop - start):  # other views may follow
                start, stop = 0, storage.nbytes()
            source = bytes_of(storage, tensor.device, start, stop - start)
            kept = self._save(source, tensor._version)
        if kept is None:
            return None
        record, token = kept
        offset = int(tensor.storage_offset()) * tensor.itemsize - record.start_bytes
        return Parked(self, token, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        """Whether it is plain strided memory that only the graph may be keeping."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != self._device.type or (tensor.is_leaf and tensor.requires_grad):
            return False
        return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)

    def _known(
        self, storage: torch.UntypedStorage, start: int, stop: int, tensor: torch.Tensor
    ) -> tuple[SavedStorage, Token] | None:
        with self._lock:
            for record in self._of_storage.get(storage._cdata, ()):
                token = record.token()
                if record.covers(start, stop, tensor._version, tensor.itemsize) and token:
                    return record, token
        return None

    def _save(self, source: torch.Tensor, version: int) -> tuple[SavedStorage, Token] | None:
        record, token = self._open_record(source, version)
        stream = current_stream(self._links.device)
        for offset in range(0, record.nbytes, self._window.piece_nbytes):
            nbytes = min(self._window.piece_nbytes, record.nbytes - offset)
            slot = self._backlog.demand(nbytes)
            if slot is None:
                self._say_full(record.nbytes)
                return None  # with its token, what was parked of it dies
            piece = SavedPiece(record.number, offset, nbytes, slot)
            piece.copied = self._links.to_host.copy(
                slot.tensor[:nbytes], source[offset : offset + nbytes]
            )
            self._copies.hold(DeviceCopy(source, piece.copied, stream), nbytes)
            with self._lock:
                record.pieces.append(piece)
            self._backlog.filled(piece)
        with self._lock:
            record.complete = True
            self._of_storage.setdefault(record.on_device.key, []).append(record)
            self._taken_nbytes += record.nbytes
        self._trim_now_and_then(record.nbytes)
        return record, token

    def _trim_now_and_then(self, nbytes: int) -> None:
        self._untrimmed_nbytes += nbytes
        if self._trim is not None and self._untrimmed_nbytes >= TRIM_NBYTES:
            self._untrimmed_nbytes = 0
            self._trim()

    def _open_record(self, source: torch.Tensor, version: int) -> tuple[SavedStorage, Token]:
        with self._lock:
            number = self._next_number
            self._next_number += 1
            token = Token(number)
            gone = weakref.ref(token, lambda _: self._token_died(number))
            start = int(source.storage_offset())
            record = SavedStorage(
                number, source.device, start, source.numel(), version, gone, WeakMemory(source)
            )
            self._records[number] = record
            self._order.append(number)
        return record, token

    def _say_full(self, nbytes: int) -> None:
        with self._lock:
            self._stayed_nbytes += nbytes
            said, self._said_full = self._said_full, True
        if said:
            return
        full = self._backlog.disk_full
        why = str(full) if full is not None else (
            f"the {format_bytes(self._window.nbytes)} of host memory for them are in use; raise "
            "budget.host or lower the batch size"
        )  # fmt: skip
        _log.warning(
            "saved activations of %s stay in device memory: %s; said once, report() counts them",
            format_bytes(nbytes), why,
        )  # fmt: skip

    @defer_signals
    def fetch(self, token: Token) -> torch.Tensor:
        """The bytes of a record on the device; starts bringing what was saved before it."""
        self._bury_dead()
        stream = current_stream(self._links.device)
        with self._lock:
            record = self._records[token.number]
            usable = not record.given_out or record.given_to == stream
            memory = record.on_device.revive() if usable else None
        if memory is None:
            memory = self._returns.bring_back(record)
        with self._lock:
            self._forget_storage(record)
            record.on_device, record.given_out = WeakMemory(memory), True
            record.given_to = stream
            self._returns.look_ahead(record.number)
        self._trim_now_and_then(record.nbytes)  # gradients were made and freed meanwhile
        return memory

    def _saved_before(self, number: int) -> Iterator[SavedStorage]:
        """Living records, latest first (lock held)."""
        for index in range(bisect.bisect_left(self._order, number) - 1, -1, -1):
            yield self._records[self._order[index]]

    def _forget_storage(self, record: SavedStorage) -> None:
        """The record no longer holds what tells its storage from every other one (lock held)."""
        key = record.on_device.key
        records = self._of_storage.get(key, [])
        if record in records:
            records.remove(record)
            if not records:
                del self._of_storage[key]

    def _token_died(self, number: int) -> None:
        """Note a token's death, on any thread, even inside this class or while its lock is held.
        So the lock is neither waited for nor entered twice; the next call buries the token then."""
        self._dead.append(number)
        if not self._lock._is_owned() and self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self._bury_dead()
            finally:
                self._lock.release()

    def _bury_dead(self) -> None:
        with self._lock:
            while self._dead:
                record = self._records.pop(self._dead.popleft())
                del self._order[bisect.bisect_left(self._order, record.number)]
                self._forget_storage(record)
                ahead = self._returns.take_ahead(record)
                if ahead is not None:  # no thread waits for it: not free before it has arrived
                    self._copies.hold(ahead, record.nbytes)
                for piece in record.pieces:
                    self._backlog.bury(piece)

    @property
    def parked_nbytes(self) -> int:
        """Bytes of living records."""
        self._bury_dead()
        with self._lock:
            return sum(record.nbytes for record in self._records.values())

    def bytes_moved(self) -> dict[str, int]:
        """Bytes since the start: taken over, and left on the device for want of room."""
        taken, stayed = self._taken_nbytes, self._stayed_nbytes
        return {"activations parked": taken, "activations stayed": stayed}

    def settle(self) -> None:
        """Wait for every move under way; raises what went wrong."""
        self._bury_dead()
        self._backlog.settle()
        self._copies.let_go()


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a strided tensor reaches: `[start, stop)`."""
    if tensor.numel() == 0:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps)
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + reach * tensor.itemsize
