"""Streams whose order is checked: `CheckedWorld`.

Copies and kernels run when they are launched; `Order` keeps what is guaranteed of their order. So a
missing wait is found where nothing went wrong this time, too.

    launches    copies, offload's kernels and PyTorch's operations (`checked_kernels`)
    waits       events, streams, transfers, a worker that is woken, a thread that is begun or joined
    accesses    those of all these; of the CPU's kernels; of reads and writes of files
    lifetimes   a lease or a slot that is freed, a tier that is closed, a tensor's memory that dies

An event counts as done where the thread that asks knows it to be, and no sooner: as if every
stream were as late as it can be; or, by chance, where it is asked for. The runtime's locks order
nothing: which thread takes a lock first is a matter of timing. `_HAND_OVERS` lists what one thread
finds because another one put it there.
"""

from __future__ import annotations

import random
import threading
import time
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.memory.device_homes import DeviceHomes
from offload.swap.activations.activation_backlog import Backlog
from offload.swap.activations.activation_returns import ActivationReturns
from offload.swap.activations.activation_window import WindowSlot
from offload.swap.device import streams
from offload.swap.device.fences import Fences
from offload.swap.io.io_backend import IOBackend
from offload.swap.io.requests_and_retries import Operation
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.versioned_file import VersionedFile
from offload.swap.threads import transfer, worker
from offload.swap.threads.lanes import Lane
from offload.swap.threads.save_gate import SaveGate
from offload.swap.threads.transfer import Transfer
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier
from offload.zero.step.chunks import ChunkBytes
from offload.zero.step.deferred_updates import DeferredUpdates
from offload.zero.step.undo_codes import Codes
from offload.zero.step.update import UpdateQueue
from tests.swap.checked_kernels import follow_kernels, operations, span_of, strided
from tests.swap.happens_before import Agent, Clock, Order, Race, merge
from tests.swap.stream_simulation import World

_LOOK_AT_DEPARTURES = (
    "may_evict", "evicted", "transit", "residency", "_staged_writes", "blank", "mark_dirty",
    "host_piece", "read_piece", "settle",
)  # fmt: skip
_HAND_OVERS = (
    # methods that record something under a lock, and methods that find it there
    ([(UpdateQueue, "submit")], [(UpdateQueue, "_begin_group")]),
    ([(UpdateQueue, "_announce")], [(UpdateQueue, "is_pending")]),
    ([(DeferredUpdates, "_done")], [(DeferredUpdates, "clear")]),
    ([(Codes, "_written")], [(Codes, "free")]),
    ([(SaveGate, "passed"), (SaveGate, "open")], [(SaveGate, "admits")]),
    ([(CachedFileState, "mark_dirty")], [(CachedFileState, "write_back")]),
    ([(VersionedFile, "_commit")], [(CachedFileState, name) for name in _LOOK_AT_DEPARTURES]),
    (
        [(Backlog, "_written_back"), (Backlog, "_arrived")],
        [(Backlog, "offer"), (Backlog, "bury"), (ActivationReturns, "_look")],
    ),
)


class CheckedStream:
    def __init__(self, world: CheckedWorld, name: str) -> None:
        self.agent = world.order.agent(name)
        self._world = world
        world.streams.append(self)  # type: ignore[arg-type]

    def launch(self) -> Agent:
        """This thread gives it work, which comes after whatever the thread has done."""
        self.agent.learn(self._world.order.tell())
        return self.agent

    def wait_event(self, event: CheckedEvent) -> None:
        with self._world.order.lock:
            self.launch().learn(event.clock)

    def synchronize(self) -> None:
        with self._world.order.lock:
            self._world.order.learn(self.launch().tell())


class CheckedEvent:
    def __init__(self, world: CheckedWorld) -> None:
        self.clock: Clock = {}
        self._agent = 0
        self._world = world

    def record(self, stream: CheckedStream) -> None:
        with self._world.order.lock:
            self.clock = stream.launch().tell()
            self._agent = stream.agent.number

    def query(self) -> bool:
        known = self._world.order.of_thread().clock
        if known.get(self._agent, 0) >= self.clock[self._agent]:
            return True
        if self._world.is_prompt():
            self._world.order.learn(self.clock)
            return True
        return False

    def synchronize(self) -> None:
        if threading.current_thread().name == "offload-copies":
            time.sleep(self._world.late_s)
            self._world.watching.wait()
        self._world.order.learn(self.clock)


class CheckedWorld(World):
    """The device of one test. `races` is what was found."""

    def __init__(self, patch: pytest.MonkeyPatch, *, prompt: float = 0.0) -> None:
        """`prompt`: how often, from 0 to 1, an event turns out to be done when it is asked for."""
        self.order = Order()
        super().__init__(patch, eager_model=True)
        self.late_s = 2e-3  # a watcher, and the end of a file's read, come so much later
        self._patch = patch
        self._prompt = prompt
        self._chance = random.Random(0)
        self._regions: list[tuple[int, int, MemoryTier]] = []
        self.fences = Fences()  # of the device's arena: set where those are made
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}  # PyTorch's own memory, by address
        self._dead: deque[tuple[Clock, int, int]] = deque()
        self._uses: defaultdict[int, Clock] = defaultdict(dict)  # of memory that is viewed, ended
        self._books: defaultdict[tuple[int, int], Clock] = defaultdict(dict)
        self._follow_threads()
        self._follow_transfers()
        self._follow_watchers()
        self._follow_books()
        self._follow_memory()
        self._follow_views()
        self._follow_files()
        follow_kernels(self, patch)

    @property
    def races(self) -> dict[Race, int]:
        """What was found so far, and how often."""
        with self.order.lock:
            self._bury()
            return self.order.races

    def is_prompt(self) -> bool:
        return self._chance.random() < self._prompt

    # ---------------------------------------------------------------- as an accelerator
    def new_stream(self, name: str, *, eager: bool = False) -> Any:
        return CheckedStream(self, name)

    def event(self, device: torch.device, *, timing: bool = False) -> Any:
        return CheckedEvent(self)

    def synchronize(self, device: torch.device) -> None:
        for stream in self.streams:
            stream.synchronize()

    def device_homes(self, plan: Any, tier: Any, device: torch.device, lock: Any) -> DeviceHomes:
        homes = super().device_homes(plan, tier, device, lock)
        self.fences = homes.links.fences
        for whose, links in (("", homes.links), ("update's ", homes._update_links)):
            links.to_device._stream.agent.name = f"{whose}copies to device"
            links.to_host._stream.agent.name = f"{whose}copies to host"
        return homes

    def training(self) -> AbstractContextManager[None]:
        """Inside, PyTorch's operations of this thread are the device's."""
        return operations(self)

    def fetched(self) -> None:
        """Values were copied to the CPU, as PyTorch does: that waits for the current stream."""
        self.current().synchronize()

    # ---------------------------------------------------------------- accesses
    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.launch("a copy", [source], [destination])
        with _disable_current_modes():
            destination.copy_(source)
        self.delayed += 1

    def launch(
        self, what: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        """Work for this thread's current stream."""
        with self.order.lock:
            self._access(self.current().launch(), what, read, written)

    def compute(
        self, what: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        """Work of this thread itself."""
        with self.order.lock:
            self._access(self.order.of_thread(), what, read, written)

    def _access(
        self, agent: Agent, what: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        self._bury()
        for tensors, write in ((read, False), (written, True)):
            for tensor in tensors:
                self._keep_track(tensor)
                self.order.access(agent, *span_of(tensor), what, write=write)

    def tier_at(self, address: int) -> Tier | None:
        """None for PyTorch's own memory, which stands for the device's."""
        for start, stop, tier in self._regions:
            if start <= address < stop:
                return tier.name
        return None

    # ---------------------------------------------------------------- PyTorch's own memory
    def _keep_track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self._alive or self.tier_at(start) is not None or not storage.nbytes():
            return
        self._alive[start] = weakref.finalize(storage, self._died, start, start + storage.nbytes())
        self._alive[start].atexit = False

    def _died(self, start: int, stop: int) -> None:
        """Anywhere, also amid an access: looked at before the next one."""
        self._alive.pop(start, None)
        self._dead.append((self._given_to_pytorch(), start, stop))

    def _bury(self) -> None:
        while self._dead:
            clock, start, stop = self._dead.popleft()
            self.order.check(clock, start, stop, "the next owner of freed memory")
            self.order.forget(start, stop)

    def _given_to_pytorch(self) -> Clock:
        """What comes before the next use of memory that this thread frees: PyTorch gives it out
        again to the model's stream. References are counted, so the thread that drops the last one
        comes after all others that did: where it is a worker, after the model's thread."""
        with self.order.lock:
            clock = dict(self.model.agent.clock)
            for thread in (threading.current_thread(), threading.main_thread()):
                merge(clock, self.order.of_thread(thread).clock)
        return clock

    # ---------------------------------------------------------------- memory of tiers
    def _follow_memory(self) -> None:
        self._around(MemoryTier, "__init__", after=self._opened)
        self._around(MemoryTier, "close", before=self._closed)
        self._around(Lease, "free", before=self._freed)
        self._around(WindowSlot, "free", before=lambda slot: self._given_back(slot.tensor))

    def _opened(self, tier: MemoryTier) -> None:
        start = tier._memory.tensor(0, 1).data_ptr()
        stop = start + tier.arena.nbytes
        self._regions.append((start, stop, tier))
        self.order.forget(start, stop)
        if tier.name is Tier.DEVICE:  # PyTorch had used it before
            self.order.access(self.model.agent, start, stop, "PyTorch's last use", write=True)

    def _closed(self, tier: MemoryTier) -> None:
        with self.order.lock:
            region = next(each for each in self._regions if each[2] is tier)
            start, stop, _ = region
            self._regions.remove(region)
            what = f"the end of the {tier.name} tier"
            self.order.check(self._given_to_pytorch(), start, stop, what)
            self.order.forget(start, stop)
            self.order.access(self.order.of_thread(), start, stop, what, write=True)

    def _freed(self, lease: Lease) -> None:
        if lease.extent.tier is not Tier.DEVICE:
            self._given_back(lease.tensor)
            return
        marks = self.fences.claim(lease.extent)  # its next owner waits for those
        with self.order.lock:
            clock = dict(self.order.of_thread().clock)
            for mark in marks:
                merge(clock, mark.event.clock)
            what = f"the next owner of the memory of {lease.owner}"
            self.order.check(clock, *span_of(lease.tensor), what)

    def _given_back(self, tensor: torch.Tensor) -> None:
        """Host memory may be written to as soon as it is free."""
        with self.order.lock:
            clock, (start, stop) = self.order.of_thread().clock, span_of(tensor)
            self.order.check(clock, start, stop, "the next owner of freed host memory")
            self.order.forget(start, stop)

    # ---------------------------------------------------------------- views, which are counted
    def _follow_views(self) -> None:
        """A thread that finds memory without views comes after the threads that had views."""
        self._around(ChunkBytes, "let_go", before=lambda part: self._let_go(_views_of(part)))
        for owner in (Lease, WindowSlot):
            self._patch.setattr(owner, "in_use", self._counted(owner.in_use))

    def _let_go(self, views: Iterable[torch.Tensor]) -> None:
        with self.order.lock:
            for view in views:
                merge(self._uses[view.untyped_storage().data_ptr()], self.order.tell())

    def _counted(self, real: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def in_use(lent: Any) -> bool:
            found = real(lent)
            if not found:
                self.order.learn(self._uses[lent.tensor.data_ptr()])
            return found

        return in_use

    # ---------------------------------------------------------------- threads
    def _follow_threads(self) -> None:
        order, begin, join = self.order, threading.Thread.start, threading.Thread.join

        def start(thread: threading.Thread) -> None:
            with order.lock:
                order.of_thread(thread).learn(order.tell())
            begin(thread)

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive():
                order.learn(order.of_thread(thread).clock)

        self._patch.setattr(threading.Thread, "start", start)
        self._patch.setattr(threading.Thread, "join", joined)

    def _follow_transfers(self) -> None:
        """A thread that finds one done comes after its mover, a callback after its caller."""
        order, made, done, then = self.order, Transfer.__init__, Transfer.done, Transfer.then
        locks = {**vars(threading), "Lock": lambda: _Lock(order)}
        self._patch.setattr(transfer, "threading", types.SimpleNamespace(**locks))
        events = {**vars(threading), "Event": lambda: _Wake(order)}
        self._patch.setattr(worker, "threading", types.SimpleNamespace(**events))

        def make(self: Transfer[Any], what: object, lane: Lane | None = None) -> None:
            made(self, what, lane)
            self._lock = _Outcome(order, self)  # type: ignore[assignment]

        def is_done(self: Transfer[Any]) -> bool:
            with self._lock:
                return done(self)

        def after(self: Transfer[Any], callback: Callable[[Transfer[Any]], object]) -> None:
            told = order.tell()

            def informed(ended: Transfer[Any]) -> object:
                order.learn(told)
                return callback(ended)

            then(self, informed)

        self._patch.setattr(Transfer, "__init__", make)
        self._patch.setattr(Transfer, "done", is_done)
        self._patch.setattr(Transfer, "then", after)
        self._around(Transfer, "wait", after=Transfer.done)

    def _follow_watchers(self) -> None:
        """What one does when a copy is done comes after what its caller had done."""
        order, watch = self.order, streams._Watcher.watch

        def watched(watcher: Any, mark: Any, what: Any, then: Any) -> Any:
            told = order.tell()

            def informed() -> None:
                order.learn(told)
                if then is not None:
                    then()
                    self._let_go(_kept_by(then))

            return watch(watcher, mark, what, informed)

        self._patch.setattr(streams._Watcher, "watch", watched)

    def _follow_books(self) -> None:
        for number, (tellers, finders) in enumerate(_HAND_OVERS):
            for owner, name in tellers:
                self._around(owner, name, before=partial(self._put_down, number))
            for owner, name in finders:
                found = partial(self._look_up, number)
                self._around(owner, name, before=found, after=found)

    def _put_down(self, number: int, owner: object) -> None:
        with self.order.lock:
            merge(self._books[_book_of(owner), number], self.order.tell())

    def _look_up(self, number: int, owner: object) -> None:
        self.order.learn(self._books[_book_of(owner), number])

    # ---------------------------------------------------------------- files
    def _follow_files(self) -> None:
        """A worker touches the bytes: after the caller's orders, before the transfer is done."""
        submit = IOBackend.submit

        def submitted(
            backend: IOBackend, operation: Operation, fd: int, buffer: memoryview, offset: int,
            before: Any = None, after: Any = None, **options: Any,
        ) -> Any:  # fmt: skip
            moved = self._file_access(operation, buffer)
            first, last = [before], [after]
            if operation is Operation.READ:
                last.insert(0, moved)
            else:
                first.insert(0, moved)
            calls = {"before": _in_turn(first), "after": _in_turn(last)}
            return submit(backend, operation, fd, buffer, offset, **calls, **options)

        self._patch.setattr(IOBackend, "submit", submitted)

    def _file_access(self, operation: Operation, buffer: memoryview) -> Callable[[], None]:
        told = self.order.tell()
        start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        stop, write = start + buffer.nbytes, operation is Operation.READ

        def moved() -> None:
            if write:
                time.sleep(self.late_s)
            with self.order.lock:
                self._bury()
                self.order.learn(told)
                agent, what = self.order.of_thread(), f"the {operation.value} of a file"
                self.order.access(agent, start, stop, what, write=write)

        return moved

    # ---------------------------------------------------------------- patching
    def _around(
        self, owner: type, name: str, *, before: Callable[[Any], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        real = getattr(owner, name)

        def method(it: Any, *args: Any, **options: Any) -> Any:
            if before is not None:
                before(it)
            result = real(it, *args, **options)
            if after is not None:
                after(it)
            return result

        self._patch.setattr(owner, name, method)


class _Lock:
    """Its holders learn what the holders before them knew."""

    def __init__(self, order: Order) -> None:
        self.clock: Clock = {}
        self._order = order
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._lock.acquire(blocking, timeout)
        if got:
            self._order.learn(self.clock)
        return got

    def release(self) -> None:
        with self._order.lock:  # another thread releases a waiter's lock
            merge(self.clock, self._order.tell())
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Outcome:
    """The lock of a transfer. Once that is settled, its holders learn what was known then."""

    def __init__(self, order: Order, settled: Transfer[Any]) -> None:
        self._clock: Clock = {}
        self._order = order
        self._lock = threading.RLock()
        self._transfer = settled

    def __enter__(self) -> None:
        self._lock.acquire()
        self._order.learn(self._clock)

    def __exit__(self, *_: object) -> None:
        if self._transfer._state is not transfer._State.PENDING:
            with self._order.lock:
                merge(self._clock, self._order.tell())
        self._lock.release()


class _Wake:
    """An event of threads: a waiter learns what the threads that set it knew."""

    def __init__(self, order: Order) -> None:
        self._clock: Clock = {}
        self._order = order
        self._event = threading.Event()
        self.clear = self._event.clear

    def set(self) -> None:
        with self._order.lock:
            merge(self._clock, self._order.tell())
        self._event.set()

    def wait(self) -> None:
        self._event.wait()
        self._order.learn(self._clock)


def _book_of(owner: object) -> int:
    return id(getattr(owner, "_backlog", getattr(owner, "_file", owner)))


def _in_turn(calls: Sequence[Callable[[], None] | None]) -> Callable[[], None]:
    def call() -> None:
        for each in calls:
            if each is not None:
                each()

    return call


def _kept_by(function: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that live as long as a function."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return strided([cells, function.__defaults__])


def _views_of(part: ChunkBytes) -> list[torch.Tensor]:
    return strided([part.in_place and part.in_place.view, part.on_device])
