"""The ways of a gradient from backward's memory into its accumulator, with its squared norm.

    HostPath      kernels of the CPU, on host memory
    DevicePath    kernels of the device: the accumulator is there
    LeavingPath   the accumulator is in host memory, the gradient is not: the first gradient of a
                  step is converted and its squares summed on its way out, and no thread waits;
                  later ones are added by the CPU, which waits for them

All leave the same bits in the accumulator, and the same sums of squares.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np
import torch

from offload.kernels.cpu import gradients as host_kernels
from offload.kernels.floats import NORM_BLOCK, Array, Runner, norm_blocks
from offload.kernels.gpu import triton_gradients as device_kernels
from offload.swap.device.staging_ring import Bucket, Run, StagingRing, runs_of
from offload.swap.device.streams import StreamEvent
from offload.swap.threads.transfer import Transfer
from offload.zero.groups.bits import FLOAT_OF, flat_array
from offload.zero.groups.layout import ParamSpec


class GradientPath(abc.ABC):
    """Moves gradients of one group. `total` and `old` are accumulators, 1D; parameters are named by
    their index, which says where they lie there. `gradient` is 1D, too."""

    __slots__ = ("_spans",)

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self._spans = [slice(spec.offset, spec.stop) for spec in specs]

    @abc.abstractmethod
    def copy(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """total = gradient, in the accumulator's format."""

    @abc.abstractmethod
    def add(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """total += gradient, in fp32."""

    def widen(self, index: int, total: torch.Tensor, old: torch.Tensor) -> None:
        """total = old: an accumulator grows from 16 bits to fp32."""
        self.copy(index, total, old[self._spans[index]])

    @abc.abstractmethod
    def squares(self, index: int) -> Array:
        """Sums of squares of the values last stored for a parameter, one per block."""

    def when_there(self, then: Callable[[], object], what: object) -> Transfer[None]:
        """Run `then` once everything sent so far is in the accumulator."""
        then()
        return Transfer.completed(None)


class HostPath(GradientPath):
    """Waits for gradients that are on a device."""

    __slots__ = ("_partials", "_run")

    def __init__(self, specs: Sequence[ParamSpec], run: Runner) -> None:
        super().__init__(specs)
        self._partials = [np.zeros(norm_blocks(spec.numel)) for spec in specs]
        self._run = run

    def copy(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        host_kernels.copy_gradient(
            flat_array(total[self._spans[index]]), flat_array(gradient.to("cpu")),
            FLOAT_OF[total.dtype], FLOAT_OF[gradient.dtype], self._partials[index], self._run,
        )  # fmt: skip

    def add(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        host_kernels.add_gradient(
            flat_array(total[self._spans[index]]), flat_array(gradient.to("cpu")),
            FLOAT_OF[gradient.dtype], self._partials[index], self._run,
        )  # fmt: skip

    def squares(self, index: int) -> Array:
        return self._partials[index]


class DevicePartials:
    """Sums of squares of all groups in device memory, fetched all at once."""

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat`: 1D fp64 on the device, with a place for every block of every gradient."""
        self._flat = flat
        self._taken = 0
        self._fetched: Array | None = None

    def take(self, blocks: int) -> slice:
        """Return places for one parameter."""
        start = self._taken
        self._taken += blocks
        assert self._taken <= self._flat.numel(), "counted from the same groups"
        return slice(start, self._taken)

    def view(self, place: slice) -> torch.Tensor:
        """Return the places, for kernels; call `changed` when one is to write there."""
        return self._flat[place]

    def changed(self) -> None:
        """Note that the current stream is given a kernel that writes sums."""
        self._fetched = None

    def read(self, place: slice) -> Array:
        """Return the sums; waits for the current stream if any is new."""
        if self._fetched is None:
            self._fetched = self._flat[: self._taken].to("cpu", copy=True).numpy()
        return self._fetched[place]


class _OnDevice(GradientPath):
    """A path whose sums of squares are made by kernels of the device."""

    def __init__(self, specs: Sequence[ParamSpec], partials: DevicePartials) -> None:
        super().__init__(specs)
        self._partials = partials
        self._places = [partials.take(norm_blocks(spec.numel)) for spec in specs]
        self._sums = [partials.view(place) for place in self._places]

    def _for_kernel(self, index: int) -> torch.Tensor:
        """Return the memory that the current stream writes sums to."""
        self._partials.changed()
        return self._sums[index]

    def squares(self, index: int) -> Array:
        return self._partials.read(self._places[index])


class DevicePath(_OnDevice):
    def copy(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        target = total[self._spans[index]]
        device_kernels.copy_gradient(target, gradient, self._for_kernel(index))

    def add(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        target = total[self._spans[index]]
        device_kernels.add_gradient(target, gradient, self._for_kernel(index))


class LeavingPath(_OnDevice):
    """First gradients go through a `StagingRing`; later ones are added by a `HostPath`."""

    def __init__(
        self, specs: Sequence[ParamSpec], partials: DevicePartials, ring: StagingRing, run: Runner
    ) -> None:
        super().__init__(specs, partials)
        self._ranges = [range(spec.offset, spec.stop) for spec in specs]
        self._ring = ring
        self._host = HostPath(specs, run)
        self._by_host = [False] * len(specs)  # the path that summed the squares last
        self._runs: dict[int, list[Run | None]] = {}  # by bytes per element
        self._last: StreamEvent | Bucket = StreamEvent()  # the last copy or bucket

    def copy(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        self._by_host[index] = False
        run = self._runs_in(total.itemsize)[index]
        if run is None:
            self._copy_in_pieces(index, total[self._spans[index]], gradient)
            return
        bucket = self._ring.bucket(run, index, total)
        self._last = bucket
        device_kernels.copy_gradient(bucket.room(index), gradient, self._for_kernel(index))
        self._ring.filled(bucket, index)

    def _runs_in(self, itemsize: int) -> list[Run | None]:
        if itemsize not in self._runs:
            self._runs[itemsize] = runs_of(self._ranges, self._ring.nbytes // itemsize)
        return self._runs[itemsize]

    def _copy_in_pieces(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Copy a gradient that is larger than a buffer. Blocks of the norm are not cut."""
        itemsize, numel = target.itemsize, target.numel()
        partials = self._for_kernel(index)
        step = self._ring.nbytes // itemsize // NORM_BLOCK * NORM_BLOCK
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            filled = self._ring.take((stop - start) * itemsize)
            blocks = slice(start // NORM_BLOCK, start // NORM_BLOCK + norm_blocks(stop - start))
            device_kernels.copy_gradient(
                filled.view(target.dtype), gradient[start:stop], partials[blocks]
            )
            self._last = self._ring.send(target[start:stop].view(torch.uint8), filled)

    def _sent(self) -> StreamEvent:
        """Return a mark that is reached when all that was copied is in the accumulator."""
        if isinstance(self._last, Bucket):
            self._last = self._ring.sent(self._last)
        return self._last

    def add(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        self._sent().wait()
        self._by_host[index] = True
        self._host.add(index, total, gradient)

    def widen(self, index: int, total: torch.Tensor, old: torch.Tensor) -> None:
        self._sent().wait()
        self._by_host[index] = True
        self._host.widen(index, total, old)

    def squares(self, index: int) -> Array:
        return self._host.squares(index) if self._by_host[index] else super().squares(index)

    def when_there(self, then: Callable[[], object], what: object) -> Transfer[None]:
        return self._ring.when_left(self._sent(), what, then)
