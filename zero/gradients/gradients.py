"""A group's gradients on their way from backward to the update.

Each gradient is taken from autograd as soon as it is computed and copied into one flat accumulator,
with its squared norm fused into the copy. The first backward pass stores 16-bit gradients
unchanged; a second one before the step makes the accumulator fp32, and the sum is the fp32 sum of
the 16-bit gradients. That rule depends on the number of passes alone, so the bits do not depend on
the accumulator's tier. `gradient_paths` does the copying.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from offload.kernels.bits import DTYPE_OF, FLOAT_OF
from offload.kernels.floats import Float, Runner
from offload.swap.device.staging_ring import StagingRing
from offload.swap.states.state import State
from offload.swap.threads.lanes import profiled
from offload.swap.threads.transfer import Transfer
from offload.zero.gradients.gradient_paths import (
    DevicePartials,
    DevicePath,
    GradientPath,
    HostPath,
    LeavingPath,
)
from offload.zero.groups.layout import ParamSpec

# makes the accumulator of a given format: bytes per element -> State
Accumulators = Callable[[int], State]


class GradientAccumulator:
    """Gradients of one group's trainable parameters, or of this rank's part of them. For the
    thread that runs backward."""

    __slots__ = (
        "__weakref__", "_factors", "_having", "_make", "_open", "_own", "_path", "_share",
        "_specs", "format", "landed", "name", "passes", "spent", "state",
    )  # fmt: skip
    is_reduced_locally = True  # the gradients arrive without waiting for other ranks

    def __init__(
        self, name: str, specs: Sequence[ParamSpec], own: Float, accumulate: Float,
        make: Accumulators, run: Runner, partials: DevicePartials | None = None,
        ring: StagingRing | None = None, share: float = 1.0,
    ) -> None:  # fmt: skip
        """`specs` are the parameters, or parts of them, at their offsets in the accumulator.
        `partials` and `ring` are given if gradients come on a device with kernels of this
        library. `share` multiplies gradients."""
        self.name = name
        self._share = share
        self._specs = list(specs)
        self._own = own
        self._make = make
        self.spent = False  # an update has used the gradients up
        self.format: Float = accumulate
        self.state: State = make(accumulate.nbytes)
        if partials is not None and self.state.at_home_on_device:
            self._path: GradientPath = DevicePath(self._specs, partials)
        elif partials is not None and ring is not None:
            self._path = LeavingPath(self._specs, partials, ring, run)
        else:
            self._path = HostPath(self._specs, run)
        self._open: torch.Tensor | None = None  # while gradients arrive: the accumulator, 1D
        self.passes = np.zeros(len(self._specs), dtype=np.int64)  # gradients summed, per parameter
        self._having: defaultdict[int, int] = defaultdict(int)  # parameters by number of passes
        self._factors = np.ones(len(self._specs))  # the factor by which users have scaled each sum
        # Everything taken in is in the accumulator, which is on its way home.
        self.landed: Transfer[None] = Transfer.completed(None)

    @property
    def has_any(self) -> bool:
        return bool(self.passes.any())

    holds_any = has_any  # gradients to clear

    def add(self, index: int, gradient: torch.Tensor) -> bool:
        """Take in a gradient of parameter `index`. Returns False if the update must not count on it
        before the step."""
        source = flat_gradient(gradient)
        before = self.passes.item(index)
        if before and self.format is not Float.FP32:
            self._promote()
        if self._factors.item(index) != 1.0:  # the gradient is added to the product
            self._arrive()
            spec = self._specs[index]
            self._opened()[spec.offset : spec.stop].mul_(self._factors[index])
            self._factors[index] = 1.0
        with profiled(f"reduce {self.name}"):
            if before:
                self._path.add(index, self._opened(), source)
            else:
                self._path.copy(index, self._opened(), source)
        self._passed(index, before + 1)
        if self._having[before + 1] == len(self._specs):
            self.close()
        return True

    def _passed(self, index: int, passes: int) -> None:
        self._having[int(self.passes[index])] -= 1
        self._having[passes] += 1
        self.passes[index] = passes

    def _opened(self) -> torch.Tensor:
        if self._open is None:
            self.landed.wait()
            buffer = self.state.tensor() if self.has_any else self.state.blank()
            if self.has_any:  # the last pass may be on its way home; with a view of it, it stays
                self.state.settle()
            self._open = buffer.view(DTYPE_OF[self.format])
        return self._open

    def write(self, index: int, value: torch.Tensor) -> None:
        """Let `value`, of the whole parameter's size, be its gradient."""
        self._arrive()
        self._path.copy(index, self._opened(), flat_gradient(value))
        self._passed(index, max(1, int(self.passes[index])))
        self._factors[index] = 1.0 / self._share
        self.close()

    def scale(self, index: int, factor: float) -> None:
        self._factors[index] *= factor  # until the values are used

    def factor(self, index: int) -> float:
        """Return the factor that an update has to multiply the values in `state` by."""
        return self._factors.item(index) * self._share

    def drop(self, indices: Sequence[int]) -> None:
        self._arrive()  # nothing may be added to what the next gradient is copied to
        for index in indices:
            self._passed(index, 0)
        self._factors[indices] = 1.0

    def _promote(self) -> None:
        """Make the accumulator fp32, keeping its values."""
        self.landed.wait()
        old_state = self.state
        old = self._open if self._open is not None else old_state.tensor()
        old = old.view(DTYPE_OF[self.format])
        self._open = None
        self.state, self.format = self._make(Float.FP32.nbytes), Float.FP32
        new = self.state.blank().view(torch.float32)
        for index in np.flatnonzero(self.passes):
            self._path.widen(int(index), new, old)
        self._open = new
        del old
        old_state.close()

    def close(self) -> bool:
        """Write back the gradients that arrived. Return False if there are none."""
        if self._open is None:
            return False
        state, buffer = self.state, self._open
        self._open = None

        def go_home(_: torch.Tensor = buffer) -> None:  # until then the view keeps it in memory
            state.mark_dirty()

        del buffer
        self.landed = self._path.when_there(go_home, f"the gradients of {self.name}")
        return True

    def settle(self) -> None:
        """Send home what arrived, and wait until all of it is there: no view is left."""
        self.close()
        self._arrive()
        self.state.settle()

    def square(self, index: int) -> float:
        """Return the sum of squares of the gradient that this rank updates a parameter with;
        infinite or NaN if that is."""
        if not self.passes[index]:
            return 0.0
        # squares are not negative: no infinities of both signs, which `fsum` refuses
        return math.fsum(self._path.squares(index).tolist()) * self.factor(index) ** 2

    def read(self, index: int) -> torch.Tensor | None:
        """Return a copy of the accumulated gradient (fp32, or 16-bit if it is neither a sum nor
        scaled), or None if there is none (any more: an update during backward uses them up)."""
        if not self.passes[index] or self.spent:
            return None
        self._arrive()
        spec = self._specs[index]
        flat = self.state.tensor().view(DTYPE_OF[self.format])
        gradient = flat[spec.offset : spec.stop].view(spec.shape).clone()
        factor = self.factor(index)
        return gradient if factor == 1.0 else gradient.float().mul_(factor)

    def _arrive(self) -> None:
        """Wait for transfers into the accumulator."""
        self.landed.wait()
        if self._open is not None:
            self._path.when_there(lambda: None, f"the gradients of {self.name}").wait()

    def spend(self) -> None:
        """Give the memory back: an update has used the gradients up. Their norm is still known."""
        self.spent = True
        self._arrive()
        self.state.discard()

    def clear(self) -> None:
        self._arrive()
        self._open = None
        self.passes[:] = 0
        self._having.clear()
        self._factors[:] = 1.0
        if not self.spent:
            self.state.discard()
        self.spent = False


def flat_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a contiguous 1D tensor, in a format that accumulators know."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.dtype not in FLOAT_OF:  # e.g. a float64 gradient hook
        gradient = gradient.float()
    return gradient.contiguous().view(-1)
