"""A flat piece of state and the two sides that use it.

The *compute side* (forward, backward) wants the whole buffer in the memory the model computes in.
The *update side* (the optimizer, on the CPU) wants it piece by piece in host memory. Where the
state's home is, and which bytes move for either side, only the subclass knows: code above this file
asks `prefetch`, `tensor`, `host_piece` and never where.
"""

import abc
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.swap.device.streams import StreamEvent
from offload.swap.io.io_backend import Priority
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import OldBytes
from offload.tiers.tier import Residency


@dataclass(slots=True)
class HostPiece:
    """A piece in host memory. The view keeps it there; its bytes count after `wait()`. Never
    changed."""

    view: torch.Tensor  # 1D uint8
    transfers: tuple[Transfer[None], ...] = ()

    def wait(self) -> torch.Tensor:
        """The view, once the piece has arrived and nothing reads it any more."""
        for transfer in self.transfers:
            transfer.wait()
        return self.view


class Quantizer(Protocol):
    """A stored format. The same stored bytes have the same values, wherever they are."""

    def stored_nbytes(self, nbytes: int) -> int:
        """Stored bytes of a buffer of `nbytes`. ValueError where it cannot be stored."""

    def quantize(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Fill `stored` from `values` (both 1D uint8). The values may be rounded. UnsupportedError
        for values that cannot be stored."""

    def update(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Like `quantize`, but what is `stored` and has the new values already is kept, as
        far as parts of the buffer can be told apart. After an error, `stored` is unchanged."""

    def dequantize(self, stored: torch.Tensor, values: torch.Tensor) -> None:
        """Fill `values` from `stored` (both 1D uint8)."""


class Undoable(Protocol):
    """A state that can return to its versions from before a speculative update."""

    @property
    def old_nbytes(self) -> OldBytes:
        """The number of bytes of all pieces' old versions, by where they are kept."""

    def has_views(self) -> bool:
        """Whether a view of a copy in memory is alive, and would show what is written."""

    def keep_old(self) -> bool:
        """Keep the old version of every piece that is written from here on, in the home's tier,
        until `drop_old` or `go_back`. Returns False if there is no memory for it."""

    def drop_old(self) -> None:
        """Accept what was written, also what is still on its way, and drop the old versions."""

    def go_back(self) -> None:
        """Restore the bytes from the time of `keep_old`. Waits for what is on its way; for callers
        that have no view of what was written."""


class Snapshot(Protocol):
    """A state's bytes as they are now, piece by piece, for a reader that takes its time.
    Thread-safe. Each piece is let go once."""

    is_versioned: bool  # the state may be overwritten meanwhile

    def read(self, piece: int, pages: torch.Tensor) -> HostPiece:
        """Start to read a piece into `pages` (host memory, whole pages, at least the piece's
        bytes), unless it is in host memory anyway."""

    def let_go(self, piece: int) -> None:
        """Let go of a piece that is not needed any more. Idempotent."""


class State(abc.ABC):
    """`nbytes` bytes in *pieces* of `piece_nbytes` (the last one may be shorter); a piece moves in
    one transfer.

    Pieces begin anew at `trainable_nbytes`, behind which nothing is updated: what is not changed is
    not written with what is. With a `stride_nbytes` they also do, up to there, at each multiple of
    it, so that each of several owners' parts is made of pieces of its own:

        ├─ 0 ──┤├ 1 ┤ ├─ 2 ──┤├ 3 ┤ ├─── 4 ────┤├─── 5 ────┤├ 6 ┤
        0             stride        trainable                   nbytes

    Guaranteed by callers: the update side works on a piece only between `host_piece` or
    `read_piece` and `mark_piece_dirty` or `write_piece`, and never while the compute side writes.
    """

    def __init__(
        self, name: str, nbytes: int, piece_nbytes: int, trainable_nbytes: int | None = None,
        stride_nbytes: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.nbytes = nbytes
        self.piece_nbytes = piece_nbytes
        self.trainable_nbytes = nbytes if trainable_nbytes is None else trainable_nbytes
        self.stride_nbytes = stride_nbytes or max(1, self.trainable_nbytes)
        self.pieces_per_stride = -(-self.stride_nbytes // piece_nbytes)
        strides, rest = divmod(self.trainable_nbytes, self.stride_nbytes)
        self._trainable_pieces = strides * self.pieces_per_stride + -(-rest // piece_nbytes)
        behind = -(-(nbytes - self.trainable_nbytes) // piece_nbytes)
        self.pieces = max(1, self._trainable_pieces + behind)

    def span(self, piece: int) -> slice:
        behind = piece - self._trainable_pieces
        if behind >= 0:
            start, end = self.trainable_nbytes + behind * self.piece_nbytes, self.nbytes
        else:
            stride, number = divmod(piece, self.pieces_per_stride)
            begin = stride * self.stride_nbytes
            start = begin + number * self.piece_nbytes
            end = min(begin + self.stride_nbytes, self.trainable_nbytes)
        return slice(start, min(start + self.piece_nbytes, end))

    in_place = False  # True: `tensor()` is the home itself and never moves
    at_home_on_device = False  # True: device memory is the home; the CPU's update stages it

    # compute side -------------------------------------------------------------------------
    @abc.abstractmethod
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Start moving the buffer to where it is computed with; True if it is or will be there.

        With a `next_use` (uses from now) it never waits and returns False where there is no room
        for something needed that late; with None it makes room, waiting where it must, or raises
        TierFullError.
        """

    @abc.abstractmethod
    def tensor(self) -> torch.Tensor:
        """1D uint8, `nbytes` long, valid; waits for its arrival. Any view of it keeps it there."""

    @abc.abstractmethod
    def blank(self) -> torch.Tensor:
        """Like `tensor`, for overwriting all of it: content undefined, nothing is read.

        The caller fills it and then calls `mark_dirty`.
        """

    @abc.abstractmethod
    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        """Start taking home the buffer that the compute side changed and still has a view of.
        Gradients, which are used up soon, go to a file only where their memory is needed for
        something else. `trainable_only`: nothing was changed behind `trainable_nbytes`.
        """

    has_quantized = False  # True: there is `quantized`

    def quantized(self) -> tuple[Quantizer, torch.Tensor]:
        """The quantizer and the stored bytes of a buffer in one piece, 1D uint8 in host memory;
        waits for their arrival, and any view keeps them there."""
        raise StateError(f"{self.name} has no quantized bytes that a model computes with")

    def note_use(self) -> None:  # noqa: B027 - a device alone reads behind the host
        """Note a use of the buffer by the compute side."""

    @abc.abstractmethod
    def residency(self) -> Residency: ...

    # the whole buffer in host memory (for loading and reading out; the same where the model
    # computes in host memory)
    def host_tensor(self) -> torch.Tensor:
        """1D uint8 in host memory, valid. Changes count after `mark_host_dirty`; until then the
        view has to be kept, or another thread may evict what it shows."""
        return self.tensor()

    def host_blank(self) -> torch.Tensor:
        """Like `host_tensor`, for overwriting all of it."""
        return self.blank()

    def mark_host_dirty(self) -> None:
        """Start taking home the buffer of `host_tensor` or `host_blank`, which was changed."""
        self.mark_dirty()

    def has_views(self) -> bool:
        """Whether a view of a copy in memory may be alive."""
        return True

    # update side --------------------------------------------------------------------------
    def prefetch_host(self, *, next_use: float) -> bool:
        """Like `prefetch`, as far as host memory: where `host_piece` will find the pieces."""
        return self.prefetch(next_use=next_use)

    @abc.abstractmethod
    def host_piece(self, piece: int) -> HostPiece | None:
        """The piece in host memory, if it is there or arriving. Does not wait.

        None where the caller has to stage it with `read_piece` and `write_piece`.
        """

    @abc.abstractmethod
    def mark_piece_dirty(self, piece: int) -> None:
        """Start taking home `host_piece(piece)`, which was changed."""

    @abc.abstractmethod
    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        """Fill `destination` (host memory, whole pages, at least the piece's bytes)."""

    @abc.abstractmethod
    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        """Take the piece home from `source`, which must not change until the transfer is done."""

    # a speculative update ------------------------------------------------------------------
    def undoable(self) -> Undoable | None:
        """This state as an `Undoable`; None if its old version cannot be kept."""
        return None

    # a save in the background -------------------------------------------------------------
    can_snapshot = False  # True: there is a `snapshot`

    def snapshot(self) -> Snapshot:
        """A snapshot of the state's bytes, once they are home; nothing is copied."""
        raise StateError(f"{self.name} cannot be kept as it is without a copy")

    # update side, on the device -----------------------------------------------------------
    def device_piece(self, piece: int) -> torch.Tensor | None:
        """The piece in device memory, if it is there: as home, or as a valid copy of it.

        Work that the thread's current stream is given from here on sees it, and may change it. The
        view keeps it there. None where the caller has to copy what `host_piece` or `read_piece`
        gives.
        """
        return None

    def used_device_piece(  # noqa: B027 - nothing to do without one
        self, piece: int, until: StreamEvent
    ) -> None:
        """Record that all work on `device_piece(piece)` was queued, and comes before the mark.

        If the home is another memory, the caller takes the changed bytes there, too, and then calls
        `mark_piece_dirty` or `write_piece`; the copy stays valid.
        """

    # both ---------------------------------------------------------------------------------
    @abc.abstractmethod
    def discard(self) -> None:
        """Forget the content and give back all memory that is not a permanent home."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until everything on its way has arrived; raises what went wrong."""

    @abc.abstractmethod
    def close(self) -> None:
        """Forget the content and give back all memory, the home too."""


class StateOverHome(State):
    """A state whose pieces are those of `home`, another state. What a subclass does not do itself,
    `home` does."""

    def __init__(self, home: State, nbytes: int, first_piece: int = 0) -> None:
        """The first piece is `first_piece` of `home`."""
        cut = home.piece_nbytes, home.trainable_nbytes, home.stride_nbytes
        super().__init__(home.name, nbytes, *cut)
        self.home = home
        self.pieces = home.pieces
        self._first = first_piece

    def span(self, piece: int) -> slice:
        return self.home.span(piece + self._first)

    def note_use(self) -> None:
        self.home.note_use()

    def residency(self) -> Residency:
        return self.home.residency()

    def host_tensor(self) -> torch.Tensor:
        return self.home.host_tensor()

    def host_blank(self) -> torch.Tensor:
        return self.home.host_blank()

    def prefetch_host(self, *, next_use: float) -> bool:
        return self.home.prefetch_host(next_use=next_use)

    def host_piece(self, piece: int) -> HostPiece | None:
        return self.home.host_piece(piece + self._first)

    def mark_piece_dirty(self, piece: int) -> None:
        self.home.mark_piece_dirty(piece + self._first)

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        return self.home.read_piece(piece + self._first, destination)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        return self.home.write_piece(piece + self._first, source)

    def undoable(self) -> Undoable | None:
        return self.home.undoable()

    def device_piece(self, piece: int) -> torch.Tensor | None:
        return self.home.device_piece(piece + self._first)

    def used_device_piece(self, piece: int, until: StreamEvent) -> None:
        self.home.used_device_piece(piece + self._first, until)


class HostCopy:
    """Pageable host memory for a copy of one state at a time, outside of any budget: there states
    are loaded and read out that are at home or computed with on a device."""

    def __init__(self) -> None:
        self._lent: tuple[State, torch.Tensor] | None = None

    def lend(self, state: State) -> torch.Tensor:
        """Memory for a copy of `state`. The last one is kept."""
        copy = torch.empty(state.nbytes, dtype=torch.uint8)
        self._lent = state, copy
        return copy

    def take_back(self, state: State) -> torch.Tensor:
        """The memory that was lent for `state`, which the caller changed. StateError if it was lent
        for none, or for another state since."""
        owner, copy = self._lent or (None, None)
        if owner is not state or copy is None:
            raise StateError(
                f"{state.name}: mark_host_dirty without host_tensor or host_blank before"
            )
        self._lent = None
        return copy
