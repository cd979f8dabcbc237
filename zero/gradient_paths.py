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

from offload.kernels import gradients as host_kernels
from offload.kernels import triton_gradients as device_kernels
from offload.kernels.floats import Array, Runner
from offload.kernels.gradients import NORM_BLOCK, norm_blocks
from offload.swap.outbox import Outbox
from offload.swap.streams import CopyMark
from offload.swap.transfer import Transfer
from offload.zero.bits import FLOAT_OF, flat_array


class GradientPath(abc.ABC):
    """Moves gradients of one group. `target` and `old` are 1D views of accumulators, `gradient` is
    1D, of as many elements; parameters are named by their index."""

    @abc.abstractmethod
    def copy(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """target = gradient, in the target's format."""

    @abc.abstractmethod
    def add(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """target += gradient, in fp32."""

    @abc.abstractmethod
    def widen(self, index: int, target: torch.Tensor, old: torch.Tensor) -> None:
        """target = old: an accumulator grows from 16 bits to fp32."""

    @abc.abstractmethod
    def squares(self, index: int) -> Array:
        """Sums of squares of the values last stored for a parameter, one per block."""

    def when_there(self, then: Callable[[], object], what: object) -> Transfer[None]:
        """Run `then` once everything sent so far is in the accumulator."""
        then()
        return Transfer.completed(None)


class HostPath(GradientPath):
    """Waits for gradients that are on a device."""

    def __init__(self, numels: Sequence[int], run: Runner) -> None:
        self._partials = [np.zeros(norm_blocks(numel)) for numel in numels]
        self._run = run

    def copy(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        host_kernels.copy_gradient(
            flat_array(target), flat_array(gradient.to("cpu")), FLOAT_OF[target.dtype],
            FLOAT_OF[gradient.dtype], self._partials[index], self._run,
        )  # fmt: skip

    def add(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        host_kernels.add_gradient(
            flat_array(target), flat_array(gradient.to("cpu")), FLOAT_OF[gradient.dtype],
            self._partials[index], self._run,
        )  # fmt: skip

    def widen(self, index: int, target: torch.Tensor, old: torch.Tensor) -> None:
        self.copy(index, target, old)

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
        """Places for one parameter."""
        start = self._taken
        self._taken += blocks
        assert self._taken <= self._flat.numel(), "counted from the same groups"
        return slice(start, self._taken)

    def for_kernel(self, place: slice) -> torch.Tensor:
        """The places, for the current stream to write to."""
        self._fetched = None
        return self._flat[place]

    def read(self, place: slice) -> Array:
        """The sums; waits for the current stream if any is new."""
        if self._fetched is None:
            self._fetched = self._flat[: self._taken].to("cpu", copy=True).numpy()
        return self._fetched[place]


class DevicePath(GradientPath):
    def __init__(self, numels: Sequence[int], partials: DevicePartials) -> None:
        self._partials = partials
        self._places = [partials.take(norm_blocks(numel)) for numel in numels]

    def _for_kernel(self, index: int) -> torch.Tensor:
        return self._partials.for_kernel(self._places[index])

    def copy(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        device_kernels.copy_gradient(target, gradient, self._for_kernel(index))

    def add(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        device_kernels.add_gradient(target, gradient, self._for_kernel(index))

    def widen(self, index: int, target: torch.Tensor, old: torch.Tensor) -> None:
        device_kernels.copy_gradient(target, old, self._for_kernel(index))

    def squares(self, index: int) -> Array:
        return self._partials.read(self._places[index])


class LeavingPath(GradientPath):
    """First gradients go through an `Outbox`; later ones are added by a `HostPath`."""

    def __init__(
        self, numels: Sequence[int], partials: DevicePartials, outbox: Outbox, run: Runner
    ) -> None:
        self._partials = partials
        self._places = [partials.take(norm_blocks(numel)) for numel in numels]
        self._outbox = outbox
        self._host = HostPath(numels, run)
        self._by_host = np.zeros(len(numels), dtype=bool)  # the path that summed the squares last
        self._last = CopyMark()

    def copy(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        self._by_host[index] = False
        partials = self._partials.for_kernel(self._places[index])
        itemsize, numel = target.element_size(), target.numel()
        step = self._outbox.nbytes // itemsize
        if numel > step:  # blocks of the norm are not cut
            step = step // NORM_BLOCK * NORM_BLOCK
        for start in range(0, numel, max(step, 1)):
            stop = min(start + step, numel)
            filled = self._outbox.take((stop - start) * itemsize)
            blocks = slice(start // NORM_BLOCK, start // NORM_BLOCK + norm_blocks(stop - start))
            device_kernels.copy_gradient(
                filled.view(target.dtype), gradient[start:stop], partials[blocks]
            )
            self._last = self._outbox.send(target[start:stop].view(torch.uint8), filled)

    def add(self, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        self._last.wait()
        self._by_host[index] = True
        self._host.add(index, target, gradient)

    def widen(self, index: int, target: torch.Tensor, old: torch.Tensor) -> None:
        self._last.wait()
        self._by_host[index] = True
        self._host.widen(index, target, old)

    def squares(self, index: int) -> Array:
        if self._by_host[index]:
            return self._host.squares(index)
        return self._partials.read(self._places[index])

    def when_there(self, then: Callable[[], object], what: object) -> Transfer[None]:
        return self._outbox.when_left(self._last, what, then)
