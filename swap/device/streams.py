"""Copies between host and device memory, and work beside the model's, ordered by events.

    model's stream   ── forward k ──┬─ forward k+1 ──┬──────────────     `mark_here`: an event
                                    │ last reader    │ waits for the arrival
    to device        ── copy j ─────┴─ copy into the memory of k ───
    to host          ── copy of a gradient, after the event of its producer ──

A copy waits for the events it is given and for nothing else; a thread waits only where it needs
the bytes themselves. On a CPU a copy is a copy: the same calls, done when they return.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from offload.swap.threads.lanes import Lane, WaitFor, be_worker, is_worker
from offload.swap.threads.transfer import Transfer
from offload.tiers import accelerator
from offload.tiers.pinning import pieces


class StreamEvent:
    """A place in a stream: everything that the stream was given before it. `event` is None where
    work is done when its call returns."""

    __slots__ = ("_device", "_lane", "_stream", "_waiting", "event")

    def __init__(
        self, event: accelerator.Event | None = None, stream: accelerator.Stream | None = None,
        device: torch.device | None = None, lane: Lane | None = None,
    ) -> None:  # fmt: skip
        """`event` was recorded in `stream`, one of `device`; waits are counted for `lane`."""
        self.event = event
        self._stream = stream
        self._device = device
        self._lane = lane
        self._waiting: accelerator.Stream | None = None  # the last one that was told to wait

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def before_compute(self) -> None:
        """Order work given to this thread's current stream from here on after the marked work."""
        if self._device is not None:
            self.before(current_stream(self._device))

    def before(self, stream: accelerator.Stream | None) -> None:
        """Order the work of `stream` from here on after the marked work, like `before_compute`."""
        if self.event is None or stream is None:
            return
        if stream in (self._stream, self._waiting):
            return
        stream.wait_event(self.event)
        self._waiting = stream  # not before: another thread may give the stream work meanwhile

    def wait(self) -> None:
        """Block this thread until the marked work is done."""
        if self.event is None:
            return
        # whether it is done already is not asked first: that is a call of the driver's, too
        if self._lane is None or is_worker():
            self.event.synchronize()
            return
        with self._lane.waiting():
            self.event.synchronize()

    def replacing(self, marks: Iterable[StreamEvent]) -> tuple[StreamEvent, ...]:
        """This mark, with those of the older `marks` that are of other streams: marks of its own
        stream are done when it is."""
        if self.event is None:
            return tuple(marks)
        return (*(mark for mark in marks if mark._stream != self._stream), self)


def mark_here(device: torch.device) -> StreamEvent:
    """A mark of everything that this thread's current stream was given so far."""
    return mark_of(current_stream(device), device)


def mark_of(
    stream: accelerator.Stream | None, device: torch.device, lane: Lane | None = None
) -> StreamEvent:
    """A mark of everything that `stream` was given so far."""
    if stream is None:
        return StreamEvent()
    event = accelerator.of(device).event(device)
    event.record(stream)
    return StreamEvent(event, stream, device, lane)


def current_stream(device: torch.device) -> accelerator.Stream | None:
    """This thread's current stream; None where work is done when its call returns."""
    kind = accelerator.KINDS.get(device.type)
    return None if kind is None else kind.current_stream(device)


def _new_stream(device: torch.device) -> accelerator.Stream | None:
    """A new stream; None where work is done when its call returns."""
    has_streams = accelerator.is_accelerator(device)
    return accelerator.of(device).stream(device) if has_streams else None


def keeping(*tensors: torch.Tensor) -> Callable[[], object]:
    """A callback for the end of a copy, which keeps `tensors` alive until it is forgotten."""
    return lambda: tensors


class WorkStream:
    """A separate stream for computing beside the model. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _new_stream(device)

    def entered(self) -> AbstractContextManager[Any]:
        """Make this the current stream of the thread, which `mark_here`, `before_compute`, copies
        and kernels then use."""
        if self._stream is None:
            return nullcontext()
        return accelerator.of(self.device).entered(self._stream)

    def close(self) -> None:
        """Wait for all work that it was given."""
        if self._stream is not None:
            self._stream.synchronize()


class CopyStream:
    """Starts copies in order. One per direction; counts what it moves.

    Threads may share it as far as PyTorch's streams are shared: copies start in some order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device)
        self.lane = Lane(WaitFor.LINK)
        self._watcher = _Watcher(self.lane)
        self._counting = threading.Lock()
        self.moved_nbytes = 0  # of all copies since the start

    def copy(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[StreamEvent] | None = None,
    ) -> StreamEvent:
        """Start `destination = source` (1D uint8, equal length, one of them on the device).

        Starts after what `after` marks; by default after everything the current stream was given
        so far, which may still read what `destination` held, or be writing `source`. Both must
        stay what they are until the mark is done (see `transfer`).
        """
        with self._counting:  # `+=` alone loses what another thread counts meanwhile
            self.moved_nbytes += source.numel()
        if self._stream is None:
            destination.copy_(source)
            return StreamEvent()
        marks = [mark_here(self._device)] if after is None else after
        for mark in marks:
            mark.before(self._stream)
        with accelerator.of(self._device).entered(self._stream):
            _start(destination, source)
        return mark_of(self._stream, self._device, self.lane)

    def transfer(
        self, mark: StreamEvent, what: object, then: Callable[[], object] | None = None
    ) -> Transfer[None]:
        """A transfer for the copy of `mark`, which is of this stream; waiting for it is optional.

        `then` runs when the copy is done, before the transfer is; until then it is kept, and with
        it what it refers to, such as the memory of both ends. Its errors are the transfer's.
        """
        return self._watcher.watch(mark, what, then)

    def await_oldest(self) -> bool:
        """Wait for the oldest copy that `transfer` was called for; False if all are done."""
        return self._watcher.await_oldest()

    def close(self) -> None:
        """Wait for every copy, and end the thread that watches them."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._watcher.close()


def _start(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Start a copy in the pieces in which host memory was pinned: the driver requires that."""
    host = source if source.is_cpu else destination
    cut = tuple(pieces(host.data_ptr(), host.numel()))
    if len(cut) == 1:  # a view of all of it costs as much as the call
        destination.copy_(source, non_blocking=True)
        return
    for piece in cut:
        destination[piece].copy_(source[piece], non_blocking=True)


@dataclass(slots=True)
class _Watched:
    mark: StreamEvent
    transfer: Transfer[None]
    then: Callable[[], object] | None

    def end(self) -> None:
        try:
            self.mark.wait()
            if self.then is not None:
                self.then()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self.transfer.fail(error)
            return
        finally:
            self.then = None  # free what it kept, before waiters wake up
        self.transfer.complete(None)


class _Watcher:
    """Waits for marks of one stream, which are done in the order they were made. Its thread starts
    with the first mark that is not done when it comes: never, where copies are done at once."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._watched: deque[_Watched] = deque()
        # One entry for each that is watched, and one for the end. A condition would do, whose waits
        # and wake-ups are Python's: they took longer than the copy's call.
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def watch(
        self, mark: StreamEvent, what: object, then: Callable[[], object] | None
    ) -> Transfer[None]:
        entry = _Watched(mark, Transfer(what, self._lane), then)
        transfer = entry.transfer
        if mark.event is None:
            entry.end()
            return transfer
        with self._lock:
            inline = self._closing
            if not inline:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._loop, name="offload-copies", daemon=True
                    )
                    self._thread.start()
                self._watched.append(entry)
                self._told.put(None)
        if inline:
            entry.end()
        return transfer

    def await_oldest(self) -> bool:
        with self._lock:
            transfer = self._watched[0].transfer if self._watched else None
        if transfer is None or threading.current_thread() is self._thread:
            return False
        transfer.wait()
        return True

    def _loop(self) -> None:
        be_worker()
        while True:
            self._told.get()
            with self._lock:
                if not self._watched:  # the end
                    return
                entry = self._watched[0]
            entry.end()
            with self._lock:
                self._watched.popleft()
            del entry

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._told.put(None)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
