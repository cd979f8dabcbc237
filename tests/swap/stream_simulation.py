"""A GPU's streams without a GPU: queues of copies that run when they have to, and no earlier.

A stream is a queue. An event stands for the front part of a queue that was there when it was
recorded; waiting for it, from a thread or from another stream, is what makes that part run. Nothing
else does, except a watcher's wait a while later. So a missing wait shows as wrong bytes, in every
run: what should have been copied has not been, and what should not have been overwritten has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.memory.device_homes import DeviceHomes
from offload.swap.device import streams
from offload.tiers import accelerator
from offload.tiers.accelerator import Accelerator

CUDA = torch.device("cuda", 0)
_WATCHED_S = 2e-3  # how much later than it could be a watched copy is done


@dataclass(eq=False)
class Stream:
    """A queue. An eager one runs everything at once: the CPU that stands in for the GPU."""

    world: World
    name: str
    eager: bool = False
    queue: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0  # from the front

    def __post_init__(self) -> None:
        self.world.streams.append(self)

    @property
    def idle(self) -> bool:
        return self.done == len(self.queue)

    def put(self, work: Callable[[], object]) -> None:
        with self.world.lock:
            self.queue.append(work)
            if self.eager:
                self.run(len(self.queue))

    def wait_event(self, event: Event) -> None:
        self.put(event.run)

    def run(self, count: int) -> None:
        with self.world.lock, _disable_current_modes(), torch._C.DisableTorchFunction():
            while self.done < count:
                work = self.queue[self.done]
                work()
                self.done += 1

    def synchronize(self) -> None:
        self.run(len(self.queue))


class Event:
    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._count = 0

    def record(self, stream: Any = None) -> None:
        self._stream, self._count = stream, len(stream.queue)

    def query(self) -> bool:
        assert self._stream is not None
        return self._stream.done >= self._count

    def run(self) -> None:
        assert self._stream is not None
        self._stream.run(self._count)

    def synchronize(self) -> None:
        assert self._stream is not None
        if threading.current_thread().name == "offload-copies":
            time.sleep(_WATCHED_S)
            self._stream.world.watching.wait()
        self.run()


class World(Accelerator):
    """The kind of `CUDA` for one test. `model` is the stream that is current by default.

    With `eager_model` this CPU does what is no copy, on whatever stream, at once; else tests put
    work on streams themselves.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, eager_model: bool) -> None:
        super().__init__(CUDA.type, "simulated")
        self.lock = threading.RLock()
        self.streams: list[Stream] = []  # every one that was made
        self.model = self.new_stream("model", eager=eager_model)
        self.delayed = 0  # copies that did not happen when they were started
        self.watching = threading.Event()  # cleared: no watched copy is done for its watcher
        self.watching.set()
        self._current = threading.local()
        patch.setitem(accelerator.KINDS, CUDA.type, self)
        patch.setattr(streams, "_start", self._copy)

        def init_work_stream(work: Any, device: torch.device) -> None:
            work.device = device
            work._stream = self.new_stream("work", eager=eager_model)

        patch.setattr(streams.WorkStream, "__init__", init_work_stream)

    def current(self) -> Stream:
        return getattr(self._current, "stream", self.model)

    def new_stream(self, name: str, *, eager: bool = False) -> Stream:
        return Stream(self, name, eager)

    # ---------------------------------------------------------------- as an accelerator
    def stream(self, device: torch.device) -> Stream:
        return self.new_stream("side", eager=False)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current()

    def event(self, device: torch.device, *, timing: bool = False) -> Any:
        return Event()

    def synchronize(self, device: torch.device) -> None:
        for stream in self.streams:
            stream.run(len(stream.queue))

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    # ---------------------------------------------------------------- copies
    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        # as a copy engine does: addresses, which keep nothing alive
        to, of = weak(destination), weak(source)
        self.current().put(lambda: to.copy_(of))
        self.delayed += 1

    def device_homes(self, plan: Any, tier: Any, device: torch.device, lock: Any) -> DeviceHomes:
        """The device's side of homes, with these streams."""
        return DeviceHomes(plan, tier, CUDA, lock)


def weak(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a storage that does not keep it, and does not count as a use of it."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), torch.device("cpu"), tensor.numel()
    )
    return torch.empty(0, dtype=torch.uint8).set_(storage)
