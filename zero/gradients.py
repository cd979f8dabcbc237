"""A group's gradients on their way from backward to the update.

Each gradient is taken from autograd as soon as it is there and copied into one flat accumulator,
with its squared norm fused into the copy. The first backward pass leaves 16-bit gradients as they
are; a second one before the step makes the accumulator fp32, and the sum is the fp32 sum of the
16-bit gradients. That rule depends on the number of passes alone, so the bits do not depend on
where the accumulator lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from offload.kernels.floats import Array, Float, Runner
from offload.kernels.gradients import add_gradient, copy_gradient, norm_blocks
from offload.swap.state import State
from offload.zero.bits import FLOAT_OF, array_of, flat_array
from offload.zero.layout import Layout, ParamSpec

# makes the accumulator of a given format: (group's layout, bytes per element) -> State
Accumulators = Callable[[int], State]


class GradientAccumulator:
    """Gradients of one group's trainable parameters. For the thread that runs backward."""

    def __init__(
        self, name: str, layout: Layout, own: Float, accumulate: Float, make: Accumulators,
        run: Runner,
    ) -> None:  # fmt: skip
        self.name = name
        self._specs = [spec for spec in layout.params if spec.trainable]
        self._own = own
        self._make = make
        self._run = run
        self.format = accumulate
        self.state: State = make(accumulate.nbytes)
        self._open: Array | None = None  # while gradients arrive: the accumulator's elements
        self._missing = 0  # gradients still expected in this backward pass
        self.passes = np.zeros(len(self._specs), dtype=np.int64)  # gradients summed, per parameter
        self._partials = [np.zeros(norm_blocks(spec.numel)) for spec in self._specs]

    @property
    def has_any(self) -> bool:
        return bool(self.passes.any())

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take in the gradient of parameter `index`; the last one expected closes the pass."""
        source, kind = _contiguous(gradient, self._own)
        if self.passes[index] and self.format is not Float.FP32:
            self._promote()
        target = self._slice(self._specs[index])
        partials = self._partials[index]
        if self.passes[index]:
            add_gradient(target, source, kind, partials, self._run)
        else:
            copy_gradient(target, source, self.format, kind, partials, self._run)
        self.passes[index] += 1
        self._missing -= 1
        if self._missing == 0:
            self.close()

    def _slice(self, spec: ParamSpec) -> Array:
        if self._open is None:
            if self.has_any:
                self.state.settle()  # the last pass may still be on its way home
            buffer = self.state.tensor() if self.has_any else self.state.blank()
            self._open = array_of(buffer, self.format)
            self._missing = len(self._specs)
        return self._open[spec.offset : spec.stop]

    def _promote(self) -> None:
        """Make the accumulator fp32, with what it holds."""
        old_state, old_format = self.state, self.format
        old = self._open if self._open is not None else array_of(old_state.tensor(), old_format)
        self._open = None
        self.state, self.format = self._make(Float.FP32.nbytes), Float.FP32
        new = array_of(self.state.blank(), Float.FP32)
        for spec, passes, partials in zip(self._specs, self.passes, self._partials, strict=True):
            if passes:
                span = slice(spec.offset, spec.stop)
                copy_gradient(new[span], old[span], Float.FP32, old_format, partials, self._run)
        self._open = new
        self._missing = len(self._specs)
        del old
        old_state.close()

    def close(self) -> None:
        """No more gradients in this pass: let the accumulator go home. Idempotent."""
        if self._open is not None:
            self._open = None
            self.state.wrote()

    def squared_norm(self) -> list[float]:
        """Sums of squares of what the accumulator holds, exact to sum with `math.fsum`."""
        held = zip(self.passes, self._partials, strict=True)
        return [float(part) for passes, partials in held if passes for part in partials]

    def read(self, index: int) -> torch.Tensor | None:
        """A copy of the accumulated gradient (fp32 or 16-bit), or None if there is none."""
        if not self.passes[index]:
            return None
        spec = self._specs[index]
        dtype = next(dtype for dtype, kind in FLOAT_OF.items() if kind is self.format)
        flat = self.state.tensor().view(dtype)
        return flat[spec.offset : spec.stop].view(spec.shape).clone()

    def clear(self) -> None:
        """Forget all gradients."""
        self._open = None
        self._missing = 0
        self.passes[:] = 0
        self.state.discard()


def total_norm(parts: list[float]) -> float:
    """The 2-norm from sums of squares; infinite or NaN if any gradient is."""
    if not all(map(math.isfinite, parts)):
        return math.nan if any(map(math.isnan, parts)) else math.inf
    return math.sqrt(math.fsum(parts))


def _contiguous(gradient: torch.Tensor, own: Float) -> tuple[Array, Float]:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    gradient = gradient.detach().to("cpu")
    kind = FLOAT_OF.get(gradient.dtype)
    if kind is None:  # e.g. a float64 gradient hook
        gradient, kind = gradient.float(), Float.FP32
    return flat_array(gradient.contiguous()), kind
