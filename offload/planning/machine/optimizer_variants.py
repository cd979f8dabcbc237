"""The variants of the optimizer kernel, each with the arrays that it passes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offload.kernels.cpu.noise import Noise
from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.rules import AdamScalars, StateFormat
from offload.kernels.variants import Master
from offload.planning.machine.speed_arrays import Array, Arrays, Stream
from offload.swap.threads.worker import ParallelRunner
from offload.zero.step.records import RecordFormat

GRAD32 = Stream("grad fp32", "float32", updated=False)
GRAD16 = Stream("grad bf16", "uint16", updated=False)
WEIGHT32 = Stream("weight fp32", "float32")
WEIGHT16 = Stream("weight bf16", "uint16")


@dataclass(frozen=True)
class Variant:
    """One way to keep weights and moments. A new variant only has to be added to VARIANTS."""

    name: str
    grad: Stream
    weight: Stream
    kept: RecordFormat

    @property
    def record(self) -> tuple[Stream, ...]:
        """The arrays of a record, in the order of its format."""
        return tuple(
            Stream(f"{field.name} {field.dtype.name}", field.dtype.name, elements_each=field.block)
            for field in self.kept.fields
        )

    @property
    def streams(self) -> tuple[Stream, ...]:
        return (self.grad, self.weight, *self.record)

    @property
    def traffic(self) -> float:
        """The bytes per parameter of one step."""
        return sum(stream.traffic for stream in self.streams)


def _split(name: str, states: StateFormat) -> Variant:
    return Variant(name, GRAD16, WEIGHT16, RecordFormat(Master.SPLIT, state_format=states))


PLAIN = Variant("ours, fp32", GRAD32, WEIGHT32, RecordFormat(Master.NONE))
SPLIT = _split("ours, split", StateFormat.FP32)
SPLIT_BF16 = _split("ours, split, bf16 moments", StateFormat.BF16)
SPLIT_INT8 = _split("ours, split, int8 moments", StateFormat.INT8)
VARIANTS = (PLAIN, SPLIT, SPLIT_BF16, SPLIT_INT8)


def filled(arrays: Arrays, stream: Stream) -> Array:
    """Return the array of `stream`, with contents that every variant can start from.

    Gradients and weights are normal numbers of a typical size; moments and scales begin at zero, as
    in training. Values in bf16 are the upper halves of fp32 ones.
    """
    return arrays.get(stream, lambda array: _fill(array, stream.name))


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


def stepper(variant: Variant, arrays: Arrays, runner: ParallelRunner) -> Callable[[], None]:
    """Return a function that makes one optimizer step."""
    grad, weight = filled(arrays, variant.grad), filled(arrays, variant.weight)
    fields = zip(variant.kept.fields, variant.record, strict=True)
    arrays_of = {field.name: filled(arrays, stream) for field, stream in fields}
    number = Float.FP32 if variant.weight is WEIGHT32 else Float.BF16
    states = variant.kept.state_format
    own = variant.kept.operands(arrays_of, slice(0, arrays.numel), scalars_of(1))
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        optimizer_step(
            grad, weight, own.states, scalars_of(steps), grad_float=number, weight_float=number,
            state_format=states, scales=own.scales, low=own.low,
            noise=None if states is StateFormat.FP32 else Noise(steps, steps), run=runner,
        )  # fmt: skip

    return step


def scalars_of(step: int) -> AdamScalars:
    """The hyperparameters that all systems use; unscaling and clipping are one factor."""
    return AdamScalars(
        lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.5
    )
