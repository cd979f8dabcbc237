"""Our optimizer kernel's variants, each with the arrays it passes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offload.kernels.floats import Float
from offload.kernels.int8 import BLOCK
from offload.kernels.noise import Noise
from offload.kernels.optimizer import optimizer_step
from offload.kernels.rules import AdamScalars, StateFormat
from offload.planning.machine.speed_arrays import Array, Arrays, Stream
from offload.swap.worker import ParallelRunner

GRAD32 = Stream("grad fp32", "float32", updated=False)
GRAD16 = Stream("grad bf16", "uint16", updated=False)
WEIGHT32 = Stream("weight fp32", "float32")
WEIGHT16 = Stream("weight bf16", "uint16")
LOW16 = Stream("low half of the master", "int16")
_DTYPES = {StateFormat.FP32: "float32", StateFormat.BF16: "uint16", StateFormat.INT8: "uint8"}


@dataclass(frozen=True)
class Variant:
    """One way to keep weights and moments. Adding one to VARIANTS is all it takes."""

    name: str
    grad: Stream
    weight: Stream
    states: StateFormat
    low: Stream | None = None

    @property
    def moments(self) -> tuple[Stream, Stream]:
        suffix, dtype = self.states.name.lower(), _DTYPES[self.states]
        return Stream(f"exp_avg {suffix}", dtype), Stream(f"exp_avg_sq {suffix}", dtype)

    @property
    def scales(self) -> tuple[Stream, ...]:
        if self.states is not StateFormat.INT8:
            return ()
        names = ("exp_avg scales", "exp_avg_sq scales")
        return tuple(Stream(name, "float32", elements_each=BLOCK) for name in names)

    @property
    def streams(self) -> tuple[Stream, ...]:
        low = () if self.low is None else (self.low,)
        return (self.grad, self.weight, *low, *self.moments, *self.scales)


PLAIN = Variant("ours, fp32", GRAD32, WEIGHT32, StateFormat.FP32)
SPLIT = Variant("ours, split", GRAD16, WEIGHT16, StateFormat.FP32, LOW16)
SPLIT_BF16 = Variant("ours, split, bf16 moments", GRAD16, WEIGHT16, StateFormat.BF16, LOW16)
SPLIT_INT8 = Variant("ours, split, int8 moments", GRAD16, WEIGHT16, StateFormat.INT8, LOW16)
VARIANTS = (PLAIN, SPLIT, SPLIT_BF16, SPLIT_INT8)


def filled(arrays: Arrays, stream: Stream) -> Array:
    """The array of `stream`, with contents that every variant can go on from.

    Gradients are normal numbers of the size one meets; weights too; moments and scales begin at
    zero, as in training. Bits of bf16 are the upper halves of fp32's.
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
    """A function that makes one step."""
    grad, weight = filled(arrays, variant.grad), filled(arrays, variant.weight)
    moments = [filled(arrays, stream) for stream in variant.moments]
    scales = [filled(arrays, stream) for stream in variant.scales]
    low = None if variant.low is None else filled(arrays, variant.low)
    number = Float.FP32 if variant.weight is WEIGHT32 else Float.BF16
    exact = variant.states is StateFormat.FP32
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        optimizer_step(
            grad, weight, moments, scalars_of(steps), grad_float=number, weight_float=number,
            state_format=variant.states, scales=scales, low=low,
            noise=None if exact else Noise(steps, steps), run=runner,
        )  # fmt: skip

    return step


def scalars_of(step: int) -> AdamScalars:
    """The numbers that all systems use; unscaling and clipping in one factor."""
    return AdamScalars(
        lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.5
    )
