"""The variants of the optimizer kernel, and the arrays that all of them pass over.

Each array starts some cache lines later than the one before, as those of a record do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.kernels.cpu.noise import Noise
from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.rules import AdamScalars, StateFormat
from offload.kernels.variants import Master
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.memory import HostMemory
from offload.tiers.units import round_up
from offload.zero.step.records import STAGGER_NBYTES, RecordFormat

_HUGE_PAGE_NBYTES = 2 << 20

Array = NDArray[Any]


@dataclass(frozen=True)
class Stream:
    """One array as a pass reads or updates it."""

    name: str
    dtype: str  # of NumPy
    updated: bool = True  # read and written back; else only read
    elements_each: int = 1  # parameters that share one element

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def traffic(self) -> float:
        """The bytes per parameter of one pass."""
        return self.itemsize * (2 if self.updated else 1) / self.elements_each


class Arrays:
    """An array of `numel` parameters for each stream, with contents that every variant can start
    from.

    Gradients and weights are normal numbers of a typical size; moments and scales begin at zero, as
    in training. Values in bf16 are the upper halves of fp32 ones.
    """

    def __init__(self, numel: int, streams: Iterable[Stream]) -> None:
        """Touches all of the memory. Streams of the same name share an array."""
        self.numel = numel
        unique = {stream.name: stream for stream in streams}
        lengths = {s.name: -(-numel // s.elements_each) * s.itemsize for s in unique.values()}
        places: dict[str, int] = {}
        end = 0
        for name, nbytes in lengths.items():
            places[name] = round_up(end, _HUGE_PAGE_NBYTES) + len(places) * STAGGER_NBYTES
            end = places[name] + nbytes
        self._memory = HostMemory(end)
        self._arrays: dict[str, Array] = {}
        for name, stream in unique.items():
            array = self._memory.tensor(places[name], lengths[name]).numpy().view(stream.dtype)
            _fill(array, name)
            self._arrays[name] = array

    def __getitem__(self, stream: Stream) -> Array:
        """The 1D array of `stream`, which is one of those given to the constructor."""
        return self._arrays[stream.name]


def _fill(array: Array, name: str) -> None:
    array.fill(0)
    if not name.startswith(("grad", "weight")):
        return
    random = np.random.default_rng(len(name))
    pattern = (random.standard_normal(1 << 20) * 0.02).astype(np.float32)
    values = pattern if array.dtype == np.float32 else (pattern.view(np.uint32) >> 16)
    for start in range(0, array.size, pattern.size):
        part = array[start : start + pattern.size]
        part[:] = values[: part.size]


@dataclass(frozen=True)
class Variant:
    """One way to keep weights and moments."""

    name: str
    number: Float  # of gradients and weights
    kept: RecordFormat

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The gradient, the weight, and the arrays of a record in the order of its format."""
        kind, dtype = self.number.name.lower(), self.number.storage.name
        grad, weight = Stream(f"grad {kind}", dtype, updated=False), Stream(f"weight {kind}", dtype)
        record = (
            Stream(f"{field.name} {field.dtype.name}", field.dtype.name, elements_each=field.block)
            for field in self.kept.fields
        )
        return grad, weight, *record

    @property
    def traffic(self) -> float:
        """The bytes per parameter of one step."""
        return sum(stream.traffic for stream in self.streams)


def _split(name: str, states: StateFormat) -> Variant:
    return Variant(name, Float.BF16, RecordFormat(Master.SPLIT, state_format=states))


PLAIN = Variant("offload, fp32", Float.FP32, RecordFormat(Master.NONE))
SPLIT = _split("offload, split", StateFormat.FP32)
SPLIT_BF16 = _split("offload, split, bf16 moments", StateFormat.BF16)
SPLIT_INT8 = _split("offload, split, int8 moments", StateFormat.INT8)


def stepper(
    variant: Variant, arrays: Arrays, runner: ParallelRunner, calls: int = 1
) -> Callable[[], None]:
    """Return a function that makes one optimizer step, in `calls` calls for equal parts."""
    grad, weight, *record = (arrays[stream] for stream in variant.streams)
    arrays_of = {f.name: array for f, array in zip(variant.kept.fields, record, strict=True)}
    number, states = variant.number, variant.kept.state_format
    length = arrays.numel // calls
    spans = [slice(start, start + length) for start in range(0, arrays.numel, length)]
    parts = [(span, variant.kept.operands(arrays_of, span, scalars_of(1))) for span in spans]
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        noise = None if states is StateFormat.FP32 else Noise(steps, steps)
        for span, own in parts:
            optimizer_step(
                grad[span], weight[span], own.states, scalars_of(steps), grad_float=number,
                weight_float=number, state_format=states, scales=own.scales, low=own.low,
                noise=noise, run=runner,
            )  # fmt: skip

    return step


def scalars_of(step: int) -> AdamScalars:
    """The hyperparameters that all systems use; unscaling and clipping are one factor."""
    return AdamScalars(
        lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.5
    )
