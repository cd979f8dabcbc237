"""The one place that asks PyTorch for an accelerator: devices, streams, events, memory, pinning.

It is asked of the module that the kind has in PyTorch, `torch.get_device_module`. A further kind
would be one more entry of `KINDS`, with a class of its own where its streams or its pinning differ.

Imports no other module of offload, so that every layer may import it, and imports torch only when
it is asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A place in a stream."""

    def record(self, stream: Any = None) -> object: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any) -> float: ...  # in ms, of events that were made to time
    def synchronize(self) -> object: ...


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any) -> object: ...
    def synchronize(self) -> object: ...


@dataclass(frozen=True)
class DeviceFacts:
    name: str
    memory_nbytes: int
    compute_capability: str
    multiprocessors: int


class Accelerator:
    """A kind of device beside the CPU: NVIDIA's GPUs, and AMD's, which PyTorch for ROCm shows under
    the same names. Every method with a `device` takes one of this kind."""

    def __init__(self, kind: str, title: str) -> None:
        self.kind = kind  # PyTorch's name of the device type, and the word in the configuration
        self.title = title
        # by device: shares of its memory, the program's own first
        self._limits: dict[int, list[tuple[float, Callable[[], None]]]] = {}
        self._is_observed = False

    @cached_property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.kind)

    def is_available(self) -> bool:
        """Whether this process can compute on a device of this kind."""
        return bool(self._module.is_available())

    def device_count(self) -> int:
        return int(self._module.device_count())

    def current_device(self) -> torch.device:
        """The device of this process: `LOCAL_RANK`'s, made current, where none was chosen yet."""
        import torch

        module, local = self._module, int(os.environ.get("LOCAL_RANK", "0"))
        if 0 < local < module.device_count() and module.current_device() == 0:
            module.set_device(local)
        return torch.device(self.kind, module.current_device())

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which `device` is this thread's current device."""
        module = self._module
        if module.current_device() == device.index:
            return nullcontext()
        where: AbstractContextManager[Any] = module.device(device)
        return where

    def built_for(self) -> str | None:
        """The platform that this PyTorch was built for, such as `CUDA 13.0`; None if not for this
        kind."""
        import torch

        if torch.version.hip:
            return f"ROCm {torch.version.hip}"
        return torch.version.cuda and f"{self.title} {torch.version.cuda}"

    def facts(self, device: torch.device) -> DeviceFacts:
        info = self._module.get_device_properties(device)
        capability, processors = f"{info.major}.{info.minor}", int(info.multi_processor_count)
        return DeviceFacts(info.name, int(info.total_memory), capability, processors)

    def free_nbytes(self, device: torch.device) -> int:
        """The free bytes, and no more than the program lets PyTorch have; 1 at least."""
        module = self._module
        free, total = module.mem_get_info(device)
        allowed = module.get_per_process_memory_fraction(device) * total
        return max(1, int(min(free, allowed - self.held_nbytes(device))))

    def held_nbytes(self, device: torch.device) -> int:
        """The bytes that tensors take now."""
        return int(self._module.memory_allocated(device))

    def limit(
        self, device: torch.device, nbytes: int, on_full: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Let PyTorch hold at most `nbytes`, or a lower limit of the program or of another call,
        until the returned function is called. `on_full` is called before more is its out-of-memory
        error."""
        import torch

        module, limits = self._module, self._limits.setdefault(device.index, [])
        limit = nbytes / module.mem_get_info(device)[1], on_full
        own = module.get_per_process_memory_fraction(device), lambda: None
        limits += [limit] if limits else [own, limit]

        def hold() -> None:
            module.set_per_process_memory_fraction(min(share for share, _ in limits), device)

        def end() -> None:
            limits.remove(limit)
            hold()
            if len(limits) == 1:  # the program's own, which it may change
                limits.clear()

        if not self._is_observed:  # for good: PyTorch has no call that ends it
            bindings: Any = torch._C
            bindings._cuda_attach_out_of_memory_observer(self._full)
            self._is_observed = True
        hold()
        return end

    def _full(self, index: int, *_: int) -> None:
        for limit in tuple(self._limits.get(index, ())):
            limit[1]()

    def peak_nbytes(self, device: torch.device) -> int:
        """The largest number of bytes that tensors took since the start."""
        return int(self._module.max_memory_allocated(device))

    def peak_reserved_nbytes(self, device: torch.device) -> int:
        """The largest number of bytes that PyTorch held, for tensors or free, since the start."""
        return int(self._module.max_memory_reserved(device))

    def generator(self, device: torch.device) -> torch.Generator:
        """The default generator of random numbers on the device."""
        generator: torch.Generator = self._module.default_generators[device.index]
        return generator

    def stream(self, device: torch.device) -> Stream:
        made: Stream = self._module.Stream(device)
        return made

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that this thread's work on the device goes to."""
        stream: Stream = self._module.current_stream(device)
        return stream

    def queue(self, device: torch.device) -> int | None:
        """The current stream's handle, which kernels of Triton are started with; None if another
        device is this thread's current one."""
        if self._module.current_device() != device.index:
            return None
        stream: Any = self.current_stream(device)
        return int(stream.cuda_stream)

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which `stream` is this thread's current stream, and its device current."""
        where: AbstractContextManager[Any] = self._module.stream(stream)
        return where

    def event(self, device: torch.device, *, timing: bool = False) -> Event:
        """A new event. A thread that waits for it sleeps: it must not take a core from the
        optimizer."""
        made: Event = self._module.Event(enable_timing=timing, blocking=True)
        return made

    def synchronize(self, device: torch.device) -> None:
        """Wait for everything that the device was given."""
        self._module.synchronize(device)

    def is_capturing(self) -> bool:
        """Whether this thread's current stream records a graph instead of running what it is
        given."""
        return bool(self._module.is_current_stream_capturing())

    def register(self, address: int, nbytes: int, device: torch.device) -> str | None:
        """Pin the runtime's memory, so that copies between it and the device are asynchronous.
        Returns why it could not be pinned, or None; copies of pageable memory are slower."""
        with self.on(device):
            status = int(self._module.cudart().cudaHostRegister(address, nbytes, 0))
            if status != 0:
                self._clear_last_error(device)
        return f"cudaHostRegister's error {status}" if status else None

    def _clear_last_error(self, device: torch.device) -> None:
        """Clear the driver's error of a failed call. The driver keeps it until PyTorch asks, which
        is after the next kernel, and PyTorch has no call that only asks: so a kernel launched here
        raises it, instead of one of the program."""
        import torch

        try:
            torch.empty(1, device=device).fill_(0.0)
        except RuntimeError:  # it is cleared when it is raised
            return

    def unregister(self, address: int, device: torch.device) -> None:
        """Undo a `register` that succeeded, once nothing uses the memory any more."""
        with self.on(device):
            try:
                self._module.synchronize(device)
            finally:
                self._module.cudart().cudaHostUnregister(address)


KINDS: dict[str, Accelerator] = {"cuda": Accelerator("cuda", "CUDA")}


def is_accelerator(device: torch.device) -> bool:
    """Whether a tensor there is out of the CPU's reach, and work on it is queued."""
    return device.type in KINDS


def of(device: torch.device) -> Accelerator:
    """The kind of an accelerator's device."""
    return KINDS[device.type]


def default() -> Accelerator | None:
    """The kind to compute on where none is named; None where there is only the CPU."""
    return next((each for each in KINDS.values() if each.is_available()), None)


def default_type() -> str:
    """PyTorch's name of the device type to compute on where none is named."""
    accelerator = default()
    return "cpu" if accelerator is None else accelerator.kind


def default_device() -> torch.device:
    """The device that this process computes on if none is named."""
    import torch

    accelerator = default()
    return torch.device("cpu") if accelerator is None else accelerator.current_device()


def device_count() -> int:
    """The number of devices of the default kind; 0 if there is only the CPU."""
    accelerator = default()
    return 0 if accelerator is None else accelerator.device_count()


def synchronize(device: torch.device) -> None:
    """Wait for everything that `device` was given; does nothing for the CPU."""
    if is_accelerator(device):
        of(device).synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back what PyTorch keeps for later tensors, and the workspaces of its libraries, after
    all work; does nothing for the CPU."""
    if is_accelerator(device):
        import torch

        synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        of(device)._module.empty_cache()


def is_capturing(device: torch.device) -> bool:
    """Whether what this thread gives `device` now is recorded as a graph, and not run."""
    return is_accelerator(device) and of(device).is_capturing()


def free_nbytes(device: torch.device) -> int:
    """The free bytes of an accelerator's memory; 0 for the CPU, which has none of its own."""
    return of(device).free_nbytes(device) if is_accelerator(device) else 0
