"""Keys and values of one layer, in pages that live in tiers (as in vLLM's paged attention).

    tokens      ├── page 0 ──┤├── page 1 ──┤├── page 2 ──┤├ open ┤
                    nvme          host          nvme        where the model computes
    attention   ├────────────── [batch, heads, tokens, dim] ─────┤   assembled for each use

A full page never changes: caches that have it in common (a copied one) share it, and another order
of the batch (beams) is a choice of its rows. Only the open page is written to. A page whose home is
a file is fetched ahead of its use, with the weights and by the same trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from offload.kv.page_format import KVShape, PageFormat
from offload.kv.store import KVStore, OpenPage
from offload.swap.io.io_backend import Priority
from offload.swap.states.state import State
from offload.swap.threads.shield import interrupted_in_waits
from offload.tiers.errors import OffloadError, StateError, StorageError, UnsupportedError
from offload.tiers.units import round_up

_NOW = -1.0  # before all that the trace expects
_PER_LOOK = 4  # pages that are read before what comes next is looked for again
Rows = torch.Tensor | None  # rows of a page, in the order of the batch; None: all, unchanged


@dataclass(eq=False)
class _Page:
    """A full page. It is given back when no reference to it is left."""

    store: KVStore
    owners: list[KVPages]
    state: State = field(init=False)

    def next_use(self) -> float:
        if len(self.owners) == 1:  # asked often
            return self.owners[0].next_use_of(self)
        return min((owner.next_use_of(self) for owner in self.owners), default=math.inf)

    def leave(self, owner: KVPages) -> None:
        self.owners.remove(owner)
        if not self.owners:
            self.store.free_page(self.state)


class KVPages:
    """Keys and values [batch, heads, length, dim] of one layer. For the thread of the model."""

    in_place = False

    def __init__(self, store: KVStore, name: str, window: int | None = None) -> None:
        """`window` is the number of tokens that are kept in the end."""
        self.name = name
        self.length = 0  # tokens
        self.batch = 0
        self.index: int  # in the trace, set by the store
        self._store = store
        self._window = window
        self._known: PageFormat | None = None  # once there were tokens
        self._pages: list[tuple[_Page, Rows]] = []
        self._open: OpenPage | None = None
        self._filled = 0  # tokens of the open page
        self._dropped = 0  # tokens of the first page that are no longer kept
        self._reading: int | None = None  # the first of the pages that a read has not come to yet
        self._places: dict[_Page, int] = {}  # each page's index in `_pages`
        self._closed = False
        store.seat(name, self)

    @property
    def state(self) -> KVPages:
        """The state that the fetcher fetches, which is all pages."""
        return self

    @property
    def _format(self) -> PageFormat:
        """The format of a page. Raises StateError before there were tokens."""
        if self._known is None:
            raise StateError(f"{self.name} is read before anything was added")
        return self._known

    # ---------------------------------------------------------------- fetching
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Prefetch the pages, in order, as far as there is room; return whether all had room.
        Errors are raised where the page is read."""
        try:
            return all(
                page.state.prefetch(next_use=next_use, priority=priority) for page, _ in self._pages
            )
        except StorageError:
            return False

    def note_use(self) -> None:
        for page, _ in self._pages:
            page.state.note_use()

    def next_use_of(self, page: _Page) -> float:
        """Return the uses until the page is needed. For any thread."""
        reading, place = self._reading, self._places.get(page)
        if reading is not None and place is not None and place >= reading:
            return _NOW
        return self._store.fetcher.trace.next_use(self.index)

    # ---------------------------------------------------------------- the verbs
    @interrupted_in_waits
    def extend(
        self, keys: torch.Tensor, values: torch.Tensor, *, keep: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens, [batch, heads, count, dim]; return keys and values of all of them, old and
        new.

        They are contiguous, with the bits of `torch.cat`, and valid until they are let go of. With
        `keep` only the last so many stay here. Raises TierFullError, and has then added nothing.
        """
        self._check(keys, values)
        self._learn(keys, values)
        past, count = self.length, keys.shape[2]
        with self._in_use():
            whole: Sequence[torch.Tensor]
            if not past and not self._format.int8:
                kind = self._format
                pairs = (keys, kind.keys), (values, kind.values)
                whole = [each.to(shape.dtype).contiguous() for each, shape in pairs]
            else:
                whole = self._room_for(past + count)
                self._read(*(each[:, :, :past] for each in whole))
                for each, new in zip(whole, (keys, values), strict=True):
                    self._format.rounded(new, into=each[:, :, past:])
        unneeded = 0 if keep is None else max(0, count - keep)
        if unneeded and past:
            self.drop_last(past)
        self._append(keys[:, :, unneeded:], values[:, :, unneeded:])
        if keep is not None:
            self.keep_last(keep)
        return whole[0], whole[1]

    @interrupted_in_waits
    def read(self, *, keys: bool = False, values: bool = False) -> list[torch.Tensor]:
        """Return the keys or values that are asked for, as `extend` does."""
        self._check_open()
        with self._in_use():
            tensors = list(self._room_for(self.length, keys=keys, values=values))
            parts = iter(tensors)
            self._read(next(parts) if keys else None, next(parts) if values else None)
        return tensors

    @interrupted_in_waits
    def keep_last(self, count: int) -> None:
        """Forget all tokens but the last `count`."""
        if count >= self.length:
            return
        if not count:
            self.drop_last(self.length)
            return
        self._dropped += self.length - count
        self.length = count
        gone, self._dropped = divmod(self._dropped, self._format.tokens)
        gone = min(gone, len(self._pages))
        self._forget(self._pages[:gone])
        del self._pages[:gone]
        self._number()

    @interrupted_in_waits
    def drop_last(self, count: int) -> None:
        """Forget the last `count` tokens, or all."""
        left = max(0, self.length - count)
        if left == self.length:
            return
        if not left:
            self._dropped = 0
        full, rest = divmod(self._dropped + left, self._format.tokens)
        if full < len(self._pages):
            if rest:  # the open page begins with the first tokens of a full one
                (page, rows), into = self._pages[full], self._open_page()
                self._format.copy(page.state.tensor(), slice(rest), rows, into)
            self._forget(self._pages[full:])
            del self._pages[full:]
            self._number()
        self.length, self._filled = left, rest

    @interrupted_in_waits
    def select(self, rows: torch.Tensor) -> None:
        """Let the batch be as many of its `rows`, which may repeat: their numbers (1D)."""
        if self._known is None:
            return
        if len(rows) != self.batch:
            raise UnsupportedError(
                f"{self.name} has a batch of {self.batch}, and is to have one of {len(rows)}; "
                "compute the prompt for all rows that follow, or remove placement.kv"
            )
        rows = rows.to(self._store.device, torch.long)
        if self._open is not None:
            written = self._open.tensor
            self._format.copy(written, slice(self._filled), rows, written)
        memo: dict[int, Rows] = {}
        for place, (page, before) in enumerate(self._pages):
            if id(before) not in memo:
                chosen = rows if before is None else before[rows]
                same = torch.equal(chosen, torch.arange(self.batch, device=rows.device))
                memo[id(before)] = None if same else chosen
            self._pages[place] = page, memo[id(before)]

    def copied(self) -> KVPages:
        """Return the same tokens once more, independent from now on. Full pages are shared."""
        self._check_open()
        other = KVPages(self._store, self.name, self._window)
        other.batch, other._known = self.batch, self._known
        if self._open is not None and self._filled:
            try:
                other._open_page().copy_(self._open.tensor[: other._open_page().numel()])
            except BaseException:
                other.close()
                raise
        other.length, other._filled, other._dropped = self.length, self._filled, self._dropped
        other._pages = list(self._pages)
        other._number()
        for page, _ in other._pages:
            page.owners.append(other)
        return other

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        pages, self._pages, self._places = self._pages, [], {}
        self.length = self._filled = 0
        try:
            self._forget(pages)
        finally:
            if self._open is not None:
                opened, self._open = self._open, None
                self._store.close_page(opened)
            self._store.left(self)

    def _give_up(self) -> None:
        """Close after bytes were lost, also states that raise that error: they would keep it, and
        all that its traceback refers to."""
        with suppress(OffloadError):
            self.close()

    # ---------------------------------------------------------------- checks
    def _check_open(self) -> None:
        self._store.check_usable()
        if self._closed:
            raise StateError(f"{self.name} is closed; make a new cache")

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check_open()
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedError(
                f"{self.name} lives in tiers, which pass no gradient on; call the model inside "
                "torch.no_grad(), or with use_cache=False"
            )
        if self._known is None:
            return
        for own, given in ((self._format.keys, keys), (self._format.values, values)):
            other = KVShape.of(given, given.dtype)
            if (self.batch, own.heads, own.dim) != (keys.shape[0], other.heads, other.dim):
                raise StateError(
                    f"{self.name} has a batch of {self.batch} with {own.heads} heads of {own.dim}, "
                    f"and is given one of {keys.shape[0]} with {other.heads} heads of {other.dim}; "
                    "use a new cache for another batch"
                )
            if torch.promote_types(own.dtype, given.dtype) != own.dtype:
                raise UnsupportedError(
                    f"{self.name} holds {own.dtype}, and is given {given.dtype}; compute all "
                    "tokens of a cache in one format"
                )

    def _learn(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the shapes when they are first seen."""
        if self._known is not None:
            return
        self.batch = keys.shape[0]
        value_type = torch.promote_types(keys.dtype, values.dtype)  # the type of torch.cat
        self._known = self._store.format(
            KVShape.of(keys, keys.dtype), KVShape.of(values, value_type), self.batch, self._window
        )

    # ---------------------------------------------------------------- reading
    def _room_for(
        self, length: int, *, keys: bool = True, values: bool = True
    ) -> tuple[torch.Tensor, ...]:
        room = round_up(length, self._format.tokens)  # as it grows, the next ones fit, too
        wanted = (("keys", keys, self._format.keys), ("values", values, self._format.values))
        return tuple(
            self._store.buffer(what, self.batch, shape, length, room)
            for what, is_wanted, shape in wanted
            if is_wanted
        )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Protect a read: no page of it makes room for another one before it was read."""
        self._reading = 0
        try:
            self._store.use(self)
            yield
        except StorageError:
            self._give_up()
            raise
        finally:
            self._reading = None
            self._store.fetch_ahead()

    def _read(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Fill [batch, heads, length, dim] of each."""
        tokens, begun = self._format.tokens, self._dropped
        skipped = begun
        ahead = 0
        for place, (page, rows) in enumerate(self._pages):
            # of a layer that has more pages than there is room for, the next ones take the place of
            # those that were read, and then those of the next layer
            ahead = self._prefetch_from(max(ahead, place))
            if ahead == len(self._pages) and place % _PER_LOOK == _PER_LOOK - 1:
                self._store.fetch_ahead()
            span = slice(skipped, tokens)
            start = place * tokens + span.start - begun
            stop = start + tokens - span.start
            into = [None if each is None else each[:, :, start:stop] for each in (keys, values)]
            self._format.read(page.state.tensor(), span, rows, *into)
            self._reading = place + 1
            skipped = 0
        if self._open is not None and self._filled > skipped:
            start = self.length - (self._filled - skipped)
            into = [None if each is None else each[:, :, start:] for each in (keys, values)]
            span = slice(skipped, self._filled)
            self._format.read(self._open.tensor, span, None, *into)

    def _prefetch_from(self, place: int) -> int:
        """Prefetch pages from `place` on; return the first without room."""
        for page, _ in self._pages[place:]:
            if not page.state.prefetch(next_use=_NOW, priority=Priority.URGENT):
                break
            place += 1
        return place

    # ---------------------------------------------------------------- writing
    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append all of it or, if that fails, nothing."""
        before, at, count = self.length, 0, keys.shape[2]
        try:
            while at < count:
                at += self._append_some(keys[:, :, at:], values[:, :, at:])
        except StorageError:
            self._give_up()
            raise
        except BaseException:
            self.drop_last(self.length - before)
            raise

    def _append_some(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Fill the open page as far as there are tokens; return how many went in."""
        kind = self._format
        count = min(keys.shape[2], kind.tokens - self._filled)
        keys, values = keys[:, :, :count], values[:, :, :count]
        if count == kind.tokens:
            self._add_page(lambda page: kind.write(page, 0, keys, values))
            self.length += count
            return count
        page = self._open_page()
        kind.write(page, self._filled, keys, values)
        if self._filled + count == kind.tokens:
            self._add_page(lambda home: home.copy_(page))
            self._filled = 0
        else:
            self._filled += count
        self.length += count
        return count

    def _add_page(self, fill: Callable[[torch.Tensor], object]) -> None:
        """Add another full page, in the tier that is its home."""
        page = _Page(self._store, [self])
        page.state = self._store.new_page(self.name, self._format.nbytes, page.next_use)
        try:
            if page.state.at_home_on_device:
                fill(page.state.blank())
                page.state.mark_dirty()
            else:
                fill(page.state.host_blank())
                page.state.mark_host_dirty()
        except BaseException:
            with suppress(OffloadError):
                page.leave(self)
            raise
        self._places[page] = len(self._pages)
        self._pages.append((page, None))

    def _open_page(self) -> torch.Tensor:
        """Return the open page's bytes."""
        if self._open is None:
            self._open = self._store.open_page(f"{self.name}, the open page", self._format.nbytes)
        return self._open.tensor[: self._format.nbytes]

    # ---------------------------------------------------------------- books
    def _number(self) -> None:
        self._places = {page: place for place, (page, _) in enumerate(self._pages)}

    def _forget(self, pages: Sequence[tuple[_Page, Rows]]) -> None:
        """Leave all pages, also if one fails; then raise the first error."""
        errors = []
        for page, _ in pages:
            try:
                page.leave(self)
            except OffloadError as error:
                errors.append(error)
        if errors:
            raise errors[0]
