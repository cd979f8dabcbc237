"""Pieces of states from any tier, and every rank's part of a group, in the order of the group's
elements, for the rank that writes.

A checkpoint does not say how many ranks there were: the first rank writes what one rank alone would
write, and is sent the others' parts piece by piece. So any number of ranks can take it over.
Experts that are spread over ranks are sent whole, each by the rank that has it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from offload.kernels.floats import Array
from offload.swap.states.quantized_state import QuantizedState
from offload.swap.states.state import Snapshot, State
from offload.tiers.errors import CheckpointError, OffloadError
from offload.tiers.host_region import HostRegion
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.store import WeightStore
from offload.zero.ranks.gathered import SharedState
from offload.zero.ranks.ranks import Ranks
from offload.zero.step.optimizer_state import OptimizerState
from offload.zero.step.records import RecordFormat

Weights = Iterator[tuple[range, torch.Tensor]]
Records = Iterator[tuple[range, dict[str, Array]]]
Snapshots = Mapping[State, Snapshot]
P = TypeVar("P")


class ElsewhereError(OffloadError):
    """Another rank failed; that rank reports the reason."""


@contextmanager
def on_all(ranks: Ranks | None, failed: str) -> Iterator[None]:
    """A context in which an error on any rank is raised on every rank; on the others it is a
    CheckpointError that begins with `failed`."""
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        if ranks is None:
            raise
        error = None if isinstance(failure, ElsewhereError) else failure
    told = None if ranks is None else ranks.all_succeeded(error)
    if error is not None:
        raise error
    if told is not None:
        raise CheckpointError(f"{failed}; {told}")


def refresh(store: WeightStore) -> None:
    """Fetch the parts that other ranks have updated, where parameters are kept whole."""
    store.ranks.refresh(store.groups)
    for group in store.groups:
        group.state.settle()


def shifted(elements: range, by: int) -> range:
    return range(elements.start + by, elements.stop + by)


def whole_state(group: ParamGroup) -> State:
    """The state with a group's pieces as this rank keeps them: all of them, or its shard's."""
    return group.state.home if isinstance(group.state, SharedState) else group.state


def own_ranges(state: OptimizerState, elements: range) -> Iterator[tuple[range, range]]:
    """The parts of a range of what this rank keeps of a group's parameters, trained ones and then
    frozen ones: each as elements counted from the range's first, and as the group's elements."""
    layout, part = state.group.layout, state.part
    regions = (range(layout.numel_trainable), range(layout.numel_trainable, layout.numel))
    first = 0
    for region in (part.trainable, part.frozen) if part.is_shard else regions:
        lo, hi = max(elements.start, first), min(elements.stop, first + len(region))
        if lo < hi:
            here = range(lo, hi)
            yield shifted(here, -elements.start), shifted(here, region.start - first)
        first += len(region)


# --------------------------------------------------------------------------- pieces
class PieceAccess:
    """Reads and overwrites whole pieces of settled states, one at a time in host memory.

    Works through the update side of `State`, so no copy is fetched, evicted or reordered: a save
    leaves every residency as it was, except that quantized weights are dequantized group by
    group. It takes memory beyond the engine's budgets: a buffer for the largest piece.
    """

    def __init__(self, snapshots: Snapshots | None = None) -> None:
        """States with a snapshot are read from it, and each piece is let go afterwards."""
        self._snapshots = snapshots or {}
        self._buffer = torch.empty(0)

    def _pages(self, span: slice) -> torch.Tensor:
        """Return memory for a piece, page-aligned, as direct I/O wants it."""
        size = round_up(span.stop - span.start, PAGE_NBYTES)
        if self._buffer.numel() < size:
            self._buffer = HostRegion(size).tensor(0, size)
        return self._buffer[:size]

    @contextmanager
    def reading(self, state: State, piece: int) -> Iterator[torch.Tensor]:
        """The piece's bytes (1D uint8, host memory), valid and unchanged within the block."""
        if isinstance(state, QuantizedState):  # dequantized into memory of its own budget
            yield state.host_tensor()[state.span(piece)]
            return
        snapshot, span = self._snapshots.get(state), state.span(piece)
        if snapshot is not None:
            yield snapshot.read(piece, self._pages(span)).wait()[: span.stop - span.start]
            snapshot.let_go(piece)
            return
        in_memory = state.host_piece(piece)
        if in_memory is not None:
            yield in_memory.wait()
        else:
            pages = self._pages(span)
            state.read_piece(piece, pages).wait()
            yield pages[: span.stop - span.start]

    @contextmanager
    def overwriting(self, state: State, piece: int, *, keeps: bool) -> Iterator[torch.Tensor]:
        """Yield memory for all of the piece's bytes, with them if it `keeps` some, else undefined;
        they are written to the home after the block, unless it raises."""
        span = state.span(piece)
        if isinstance(state, QuantizedState):
            values = state.host_tensor()
            yield values[span]
            state.mark_host_dirty()
            return
        in_memory = state.host_piece(piece)
        if in_memory is not None:
            yield in_memory.wait()
            state.mark_piece_dirty(piece)
            return
        pages = self._pages(span)
        if keeps:
            state.read_piece(piece, pages).wait()
        yield pages[: span.stop - span.start]
        state.write_piece(piece, pages).wait()


def elements_of(state: State, piece: int, itemsize: int) -> range:
    """A piece's range of the flat buffer."""
    span = state.span(piece)
    return range(span.start // itemsize, span.stop // itemsize)


# --------------------------------------------------------------------------- ranks
class ShardReader:
    """Reads groups for the writing rank. On the others, the same iterations send their parts and
    yield nothing.

    With several ranks no error is raised before they `meet`: the others go on sending and
    receiving until then, and would wait for a rank that left. After one, nothing of this rank's is
    read, and nothing is attempted.
    """

    def __init__(self, access: PieceAccess, ranks: Ranks | None, itemsize: int) -> None:
        self._access = access
        self._ranks = ranks
        self._itemsize = itemsize
        self._failure: Exception | None = None
        self._meetings = 0

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes."""
        return self._ranks is None or self._ranks.rank == 0

    def attempt(self, step: Callable[..., object], *args: object, by_all: bool = False) -> None:
        """Call `step(*args)`, a part of writing, on the rank that writes, or on all of them."""
        if self._failure is not None or not (by_all or self.writes):
            return
        try:
            step(*args)
        except Exception as error:
            if self._ranks is None:
                raise
            self._failure = error

    def meet(self, wish: int = -1) -> int:
        """Let all ranks meet, after each group: those with nothing to send must not wait for the
        whole of a long save, which `zero.timeout_s` would end. Raises the first error of reading or
        writing; on ranks without one, ElsewhereError. Returns a wish that a rank has, not always
        the same rank's; -1 if none has one."""
        if self._ranks is None:
            return wish
        mine = [wish, int(self._failure is not None)]
        rows = self._ranks.exchange(mine, "which group is saved")
        if rows[:, 1].any():
            raise self._failure or ElsewhereError("another rank")
        self._meetings += 1
        wishes = np.roll(rows[:, 0], self._meetings).tolist()
        return next((each for each in wishes if each >= 0), -1)

    def weights(self, state: OptimizerState, owner: int, frozen: bool | None = None) -> Weights:
        """A group's parameters: elements, and their bytes (1D uint8), valid until the next ones.
        `owner`: the rank whose expert is read, of a group that only one rank has. `frozen`: the
        frozen or the trained ones alone."""
        if not state.part.is_shard:
            yield from self._in_turn(partial(self._own_weights, state, frozen), (owner,))
            return
        for each in (False, True) if frozen is None else (frozen,):
            own = partial(self._own_weights, state, each)
            yield from self._in_turn(own, range(state.part.layout.ranks))

    def _own_weights(self, state: OptimizerState, frozen: bool | None) -> Weights:
        """Return this rank's elements of a group: all, or the frozen or trained ones."""
        home, itemsize = whole_state(state.group), self._itemsize
        for piece in range(home.pieces):
            ranges = own_ranges(state, elements_of(home, piece, itemsize))
            numel = state.group.layout.numel_trainable
            read = [r for r in ranges if frozen in (None, r[1].start >= numel)]
            if read:
                with self._access.reading(home, piece) as raw:
                    for here, elements in read:
                        yield elements, raw[here.start * itemsize : here.stop * itemsize]
                    del raw

    def records(self, state: OptimizerState, saved: RecordFormat, owner: int = 0) -> Records:
        """A group's optimizer records in the format `saved`: elements, and arrays of them."""
        ranks, ep_size = state.part.layout.ranks, state.group.ep_size
        if ranks == 1 and owner == 0:
            if self.writes:
                yield from self._unless_failed(partial(self._own_records, state, saved))
            return
        senders = range(owner, ranks * ep_size, ep_size)
        for elements, raw in self._in_turn(partial(self._packed_records, state, saved), senders):
            yield elements, saved.arrays(raw, len(elements))

    def _own_records(self, state: OptimizerState, saved: RecordFormat) -> Records:
        first, kept = state.part.trainable.start, state.record_format
        for elements, record in zip(state.chunks, state.records, strict=True):
            with self._access.reading(record, 0) as raw:
                arrays = kept.in_format(kept.arrays(raw, len(elements)), saved)
                yield shifted(elements, first), arrays
                del raw
                arrays.clear()

    def _packed_records(self, state: OptimizerState, saved: RecordFormat) -> Weights:
        for elements, arrays in self._own_records(state, saved):
            packed = torch.zeros(saved.nbytes(len(elements)), dtype=torch.uint8)
            for name, array in saved.arrays(packed, len(elements)).items():
                array[:] = arrays[name]
            yield elements, packed

    def _in_turn(self, own: Callable[[], Weights], senders: Sequence[int]) -> Weights:
        """The parts of a group that the `senders` have, one rank after the other."""
        ranks = self._ranks
        if ranks is None:
            yield from own()
            return
        for rank in senders:
            if rank == ranks.rank == 0:
                yield from self._unless_failed(own)
            elif rank == ranks.rank:
                for elements, raw in self._unless_failed(own):
                    ranks.send(torch.tensor([elements.start, elements.stop, raw.numel()]), 0)
                    ranks.send(raw, 0)
                ranks.send(torch.tensor([0, 0, 0]), 0)  # the end, also where a part is missing
            elif self.writes:
                yield from self._received(ranks, rank)

    def _unless_failed(self, own: Callable[[], Iterator[P]]) -> Iterator[P]:
        if self._ranks is None:
            yield from own()
            return
        if self._failure is not None:
            return
        try:
            yield from own()
        except Exception as error:  # noqa: BLE001 - raised on every rank, where they meet
            self._failure = error

    def _received(self, ranks: Ranks, rank: int) -> Weights:
        while True:
            start, stop, nbytes = ranks.receive(3, torch.int64, rank).tolist()
            if not nbytes:
                return
            yield range(start, stop), ranks.receive(nbytes, torch.uint8, rank)
