"""The KV caches of a model: their pages in tiers, and the memory that attention reads them from.

    layer ─▶ KVPages ─new_page─▶ State      a full page, in the tier that the placement gives it
                │──open_page───▶ OpenPage   the one that is written to, where the model computes
                │─────buffer───▶ Lease      keys and values for attention, the same for each layer
                └──────use─────▶ Fetcher    pages are fetched ahead with the weights

Each call of `generate` makes a cache. A cache without references is freed by the store's next call,
or at once where that is safe: its last reference may end anywhere, in any thread, also amid the
store's own bookkeeping.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from offload.kv.page_format import KVShape, PageFormat
from offload.planning.plan.kv_plan import KV_PAGE_NBYTES
from offload.swap.states.fetching import Fetchable, Fetcher
from offload.swap.states.state import State
from offload.tiers.errors import OffloadError, StateError, TierFullError
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

_log = logging.getLogger("offload")
_MIN_WINDOW_PAGES = 8  # a page is at most this part of a window: what is kept beside it
_SLAB_NBYTES = 32 << 20  # about, of several open pages together
_TRIM_NBYTES = 8 << 20  # bytes of new pages after which freed memory is returned to the system
_OPEN_SHARE = 4  # ... and all open pages together at most this part of the memory there is


class KVHomes(Protocol):
    """The memory for pages of keys and values. Raises TierFullError if a budget has no room."""

    lock: threading.RLock

    def kv_page(self, name: str, nbytes: int, next_use: Callable[[], float]) -> State:
        """Return the home of another page."""
        ...

    def free_kv_page(self, state: State) -> None: ...

    def kv_memory(self, name: str, nbytes: int) -> Lease:
        """Return memory that the model computes with."""
        ...

    def free_kv_memory(self, lease: Lease) -> None:
        """Free memory; reads of it that are already queued may finish."""
        ...


class SeatedPages(Fetchable, Protocol):
    """The pages of one layer of a cache (`KVPages`). Their number in the trace is that of the same
    layer in the cache before."""

    index: int

    def close(self) -> None: ...


@dataclass(eq=False)
class _Slab:
    """One lease for several open pages of a size: apart they would cut up the memory that slots
    come and go in, until nothing large finds room."""

    lease: Lease
    free: list[OpenPage] = field(default_factory=list)
    cells: int = 0


@dataclass(eq=False)
class OpenPage:
    """Memory of an open page."""

    tensor: torch.Tensor  # 1D uint8
    slab: _Slab


class KVStore:
    """Owns the pages of all caches of one model. For the thread of the model."""

    def __init__(
        self, homes: KVHomes, fetcher: Fetcher, device: torch.device, *, room_nbytes: int,
        page_nbytes: int | None = None, tokens: int = 0, int8: bool = False, layers: int = 1,
        session: AbstractContextManager[object] | None = None,
        check_usable: Callable[[], None] = lambda: None,
        trim: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """`room_nbytes` is the memory that open pages and what attention reads may take, `tokens`
        of all rows of the batch are planned for (0: unknown), `layers` is about how many layers
        caches have. A page has about `page_nbytes`; by default it is `KV_PAGE_NBYTES` long, if that
        leaves room for open ones. `trim` gives memory that was freed back to the system, now and
        then."""
        self.fetcher = fetcher
        self.device = device
        self.check_usable = check_usable
        self._homes = homes
        self._room_nbytes = room_nbytes
        self._page_nbytes = page_nbytes
        self._planned_tokens = tokens
        self._int8 = int8
        self._layers = layers
        self._trim = trim
        self._untrimmed_nbytes = 0
        self._session: AbstractContextManager[object] = session or nullcontext()
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._live: dict[int, SeatedPages] = {}  # by number
        self._free_numbers: list[int] = []
        self._dropped: deque[SeatedPages] = deque()  # without references
        self._buffers: dict[str, list[Lease]] = {}
        self._slabs: dict[int, list[_Slab]] = {}  # by the size of a page
        self._closed = False

    # ---------------------------------------------------------------- pages
    def seat(self, name: str, pages: SeatedPages) -> None:
        """Give pages their number. Raises StateError if the store is closed."""
        self.reap()
        if self._closed:
            raise StateError(f"{name}: the model was given back; dispatch it again")
        if self._free_numbers:
            pages.index = self._free_numbers.pop()
            self.fetcher.replace(pages)
        else:
            pages.index = self.fetcher.next_number
            self.fetcher.add(pages)
        self._live[pages.index] = pages

    def left(self, pages: SeatedPages) -> None:
        """Note that pages were closed."""
        if self._live.pop(pages.index, None) is not None:
            self._free_numbers.append(pages.index)
            self._free_numbers.sort(reverse=True)  # the same order for the next cache

    def drop(self, pages: SeatedPages) -> None:
        """Give back pages to which no reference is left. For any thread, at any time."""
        if os.getpid() != self._process:  # a forked child: they are its parent's
            return
        self._dropped.append(pages)
        self.tidy()

    def tidy(self) -> None:
        """Call `reap`, if it can be done here and now. For any thread, at any time."""
        held = self._homes.lock._is_owned()  # type: ignore[attr-defined]
        if threading.get_ident() == self._thread and not held:
            self.reap()

    def reap(self) -> None:
        """Give back all pages to which no reference is left."""
        while self._dropped:
            try:
                self._dropped.popleft().close()
            except OffloadError as error:  # the bytes are no longer needed
                _log.warning("while a KV cache was given back: %s", error)
        if not self._live:
            self._free_buffers()

    def expect_none(self) -> None:
        """Note that the model trains now: pages that are kept make room first, and what has no
        reference left is given back. For a store with a fetcher of its own."""
        self.tidy()
        self.fetcher.trace.assume(())

    # ---------------------------------------------------------------- for pages
    def use(self, pages: SeatedPages) -> None:
        """Note that pages are needed now, and prefetch them."""
        self.check_usable()
        self._thread = threading.get_ident()  # threads take turns
        self.reap()
        with self._session:
            self.fetcher.need(pages)

    def fetch_ahead(self) -> None:
        """Prefetch the states that are used next."""
        with self._session:
            self.fetcher.fetch_ahead()

    def format(self, keys: KVShape, values: KVShape, batch: int, window: int | None) -> PageFormat:
        """Return the format of the pages of one layer."""
        of_one = PageFormat(keys, values, batch, 1, self._int8)
        max_nbytes = self._page_nbytes or min(
            KV_PAGE_NBYTES, self._room_nbytes // (_OPEN_SHARE * self._layers)
        )
        tokens = max(1, max_nbytes // of_one.token_nbytes)
        if window is not None:
            tokens = min(tokens, max(1, window // _MIN_WINDOW_PAGES))
        return replace(of_one, tokens=tokens)

    def new_page(self, name: str, nbytes: int, next_use: Callable[[], float]) -> State:
        # What describes a page stays, amid temporaries of a prompt, which leave holes that the
        # next ones do not fit into.
        self._untrimmed_nbytes += nbytes
        if self._trim is not None and self._untrimmed_nbytes >= _TRIM_NBYTES:
            self._untrimmed_nbytes = 0
            self._trim()
        return self._homes.kv_page(name, nbytes, next_use)

    def free_page(self, page: State) -> None:
        self._homes.free_kv_page(page)

    def open_page(self, name: str, nbytes: int) -> OpenPage:
        """Return memory for a page that is written to."""
        size = round_up(nbytes, PAGE_NBYTES)
        for slab in self._slabs.get(size, ()):
            if slab.free:
                return slab.free.pop()
        slab = self._new_slab(name, size)
        self._slabs.setdefault(size, []).append(slab)
        return slab.free.pop()

    def _new_slab(self, name: str, size: int) -> _Slab:
        """Allocate a slab of a page for each layer, or of as many as find room, or of one."""
        slabs = -(-self._layers * size // _SLAB_NBYTES)
        cells = -(-self._layers // slabs)
        room = self._room_nbytes // (_OPEN_SHARE * size)
        cells = max(1, min(cells, room - sum(slab.cells for slab in self._slabs.get(size, ()))))
        try:
            lease = self._homes.kv_memory(name, cells * size)
        except TierFullError:
            if cells == 1:
                raise
            cells = 1
            lease = self._homes.kv_memory(name, size)
        slab = _Slab(lease, cells=cells)
        slab.free = [
            OpenPage(lease.tensor[at * size : (at + 1) * size], slab)
            for at in reversed(range(cells))
        ]
        return slab

    def close_page(self, page: OpenPage) -> None:
        """Take back an open page's memory."""
        slab = page.slab
        slab.free.append(page)
        if len(slab.free) == slab.cells:
            size = page.tensor.numel()
            self._slabs[size].remove(slab)
            slab.free.clear()
            self._homes.free_kv_memory(slab.lease)

    def buffer(self, what: str, batch: int, shape: KVShape, length: int, room: int) -> torch.Tensor:
        """Return [batch, heads, length, dim], contiguous, content undefined, in memory that has
        room for `room` tokens. That memory is not used again while any view of it is alive."""
        # of the planned size from the beginning on: later there may be no such room in one piece
        room = max(room, self._planned_tokens // batch)
        token_nbytes = batch * shape.heads * shape.dim * shape.dtype.itemsize
        lease = self._lease_for(what, room * token_nbytes)
        flat = lease.tensor[: length * token_nbytes].view(shape.dtype)
        return flat.view(batch, shape.heads, length, shape.dim)

    def _lease_for(self, what: str, nbytes: int) -> Lease:
        kept = self._buffers.setdefault(what, [])
        idle = [lease for lease in kept if not lease.in_use()]
        fitting = [lease for lease in idle if lease.extent.nbytes >= nbytes]
        chosen = min(fitting, key=lambda lease: lease.nbytes, default=None)
        for lease in idle:
            if lease is not chosen:
                kept.remove(lease)
                self._homes.free_kv_memory(lease)
        if chosen is None:
            chosen = self._homes.kv_memory(f"KV cache, {what} for attention", nbytes)
            kept.append(chosen)
        return chosen

    # ---------------------------------------------------------------- the end
    def _free_buffers(self, *, used: bool = False) -> None:
        """Free the memory that attention reads from; also where tensors in it are `used`."""
        for kept in self._buffers.values():
            for lease in [lease for lease in kept if used or not lease.in_use()]:
                kept.remove(lease)
                self._homes.free_kv_memory(lease)

    def close(self) -> None:
        """Close all pages. Tensors that were given out must not be used any more."""
        self._closed = True
        self.reap()
        for pages in list(self._live.values()):
            pages.close()
        self._free_buffers(used=True)
