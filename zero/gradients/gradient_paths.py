"""The ways of a gradient from backward's memory into its accumulator, with its squared norm.

    HostPath      kernels of the CPU, on host memory
    DevicePath    kernels of the device: the accumulator is there
    LeavingPath   the accumulator is in host memory, the gradient is not: the first gradient of a
                  step is converted and its squares summed on its way out; later ones are added
                  by the CPU once they are there. No thread waits, where the steps' passes were
                  planned

All leave the same bits in the accumulator, and the same sums of squares.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from offload.kernels.bits import FLOAT_OF, flat_array
from offload.kernels.cpu import gradients as host_kernels
from offload.kernels.floats import NORM_BLOCK, Array, Runner, norm_blocks
from offload.kernels.gpu import triton_gradients as device_kernels
from offload.swap.device.staging_ring import Bucket, Part, StagingRing, parts_of
from offload.swap.device.streams import StreamEvent
from offload.swap.threads.transfer import Failure, Transfer
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
        self.add_blocks(index, slice(None), total[self._spans[index]], gradient.to("cpu"))

    def add_blocks(
        self, index: int, blocks: slice, target: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """target += gradient, of some blocks of a parameter."""
        host_kernels.add_gradient(
            flat_array(target), flat_array(gradient), FLOAT_OF[gradient.dtype],
            self._partials[index][blocks], self._run,
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

    def _for_kernel(self, index: int) -> torch.Tensor:
        """Return the memory that the current stream writes sums to."""
        self._partials.changed()
        return self._partials.view(self._places[index])

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
    """First gradients go through a `StagingRing`. Later ones land in its host memory, from where a
    `HostPath` adds them on the ring's thread, in the order in which they were sent. A ring without
    such memory (one pass per step was planned) lets the thread of backward wait and add."""

    def __init__(
        self, specs: Sequence[ParamSpec], partials: DevicePartials, ring: StagingRing, run: Runner
    ) -> None:
        super().__init__(specs, partials)
        self._ranges = [range(spec.offset, spec.stop) for spec in specs]
        self._ring = ring
        self._host = HostPath(specs, run)
        self._by_host = [False] * len(specs)  # the path that summed the squares last
        self._adds = False  # additions may be under way
        self._failure: Failure | None = None  # of an addition
        # each gradient's parts, by whether they land and their format
        self._parts: dict[tuple[bool, torch.dtype], list[list[Part]]] = {}
        self._last: Bucket | None = None

    def _parts_of(self, index: int, dtype: torch.dtype, *, lands: bool) -> list[Part]:
        if (lands, dtype) not in self._parts:
            self._parts[lands, dtype] = parts_of(
                self._ranges, self._ring.nbytes // dtype.itemsize, NORM_BLOCK
            )
        return self._parts[lands, dtype][index]

    def copy(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        self._by_host[index] = False
        sums = self._for_kernel(index)
        for part in self._parts_of(index, total.dtype, lands=False):
            self._last = bucket = self._ring.bucket(part.run, part.number, total.dtype, total)
            device_kernels.copy_gradient(
                bucket.room(part.number), gradient[part.elements], sums[part.blocks]
            )
            self._ring.filled(bucket, part.number)

    def _sent(self) -> StreamEvent:
        """Return a mark that is reached when all that was sent has arrived."""
        return StreamEvent() if self._last is None else self._ring.sent(self._last)

    def add(self, index: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        self._by_host[index] = True
        if not self._ring.lands:
            self._ring.warn_of_waits()
            self._sent().wait()
            self._host.add(index, total, gradient)
            return
        self._adds = True
        target = total[self._spans[index]]
        for part in self._parts_of(index, gradient.dtype, lands=True):
            self._last = bucket = self._ring.bucket(part.run, part.number, gradient.dtype)
            bucket.room(part.number).copy_(gradient[part.elements])
            add = partial(self._add_landed, index, target[part.elements], part)
            self._ring.filled(bucket, part.number, add)

    def _add_landed(
        self, index: int, target: torch.Tensor, part: Part, landed: torch.Tensor
    ) -> None:
        """Add a part that has landed. For the ring's thread."""
        try:
            self._host.add_blocks(index, part.blocks, target, landed)
        except BaseException as error:
            self._failure = Failure(error)  # raised where the gradients are waited for
            raise

    def widen(self, index: int, total: torch.Tensor, old: torch.Tensor) -> None:
        self._sent().wait()
        self._by_host[index] = True
        self._host.widen(index, total, old)

    def squares(self, index: int) -> Array:
        if not self._by_host[index]:
            return super().squares(index)
        if self._adds:
            self.when_there(lambda: None, "sums of squares of gradients").wait()
            self._adds = False
        return self._host.squares(index)

    def when_there(self, then: Callable[[], object], what: object) -> Transfer[None]:
        def arrived() -> None:
            if self._failure is not None:
                raise self._failure.again()
            then()

        return self._ring.when_left(self._sent(), what, arrived)
