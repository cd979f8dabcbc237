"""A weight with the states of any rule in any format, stepped by the kernel or by its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.cpu.optimizer import optimizer_step, scale_blocks
from offload.kernels.floats import Array, Float
from offload.kernels.rules import (
    AdagradScalars,
    AdamScalars,
    LionScalars,
    MuonScalars,
    MuonWeightScalars,
    Scalars,
    SgdScalars,
    StateFormat,
    is_signed,
)
from offload.kernels.variants import Master
from tests.kernels import reference, reference_rules
from tests.kernels.values import SPECIAL, assert_same

NOISE = Noise(0x12345678, 0x9ABCDEF0, first=0xFFFFFE00)  # the numbers wrap in a long array
RULES: dict[str, Scalars] = {
    "adamw": AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37),
    "adam": AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, decoupled=False, maximize=True),
    "lion": LionScalars(1e-3, 0.9, 0.99, 0.1, grad_scale=0.37),
    "adagrad": AdagradScalars(1e-2, 1e-10, 0.1, step=3, lr_decay=0.01, grad_scale=0.37),
    "sgd": SgdScalars(1e-2, 0.0, 0.1, step=3, grad_scale=0.37),
    "momentum": SgdScalars(1e-2, 0.9, 0.1, step=3, dampening=0.1, maximize=True),
    "nesterov": SgdScalars(1e-2, 0.9, 0.1, step=3, nesterov=True),
    "muon": MuonScalars(
        1e-2, 0.1, 0.95, True, 3.4445, -4.775, 2.0315, 1e-7, 5, False, grad_scale=0.37
    ),
}
MUON_WEIGHTS = MuonWeightScalars(0.999, -0.02)
UNUSUAL = [
    AdamScalars(1e-3, 0.0, 0.0, 1e-8, 0.0, step=1),
    AdamScalars(0.0, 0.9, 0.95, 0.0, 0.1, step=1),
    AdamScalars(1e-3, 0.3, 0.5, 1e-30, 0.1, step=10**9),
    AdamScalars(-1.0, 0.9, 0.999, 1.0, 2.0, step=2, grad_scale=0.0),
    AdamScalars(1e-3, 0.9, 0.999, 1e-45, 0.1, step=2, grad_scale=2.0**-130),
]
WEIGHTS = [
    (Float.FP32, Master.NONE),
    (Float.BF16, Master.NONE),
    (Float.BF16, Master.SPLIT),
    (Float.BF16, Master.FP32),
    (Float.FP16, Master.FP32),
]
Draw = Callable[[int], NDArray[np.float32]]


@dataclass(frozen=True)
class Formats:
    grad: Float = Float.BF16
    weight: Float = Float.BF16
    master: Master = Master.SPLIT
    states: StateFormat = StateFormat.FP32

    def __str__(self) -> str:
        return "-".join(x.name.lower() for x in (self.grad, self.weight, self.master, self.states))


@dataclass
class Stored:
    """Arrays as `optimizer_step` takes them."""

    formats: Formats
    names: tuple[str, ...]
    weight: Array
    states: list[Array]
    scales: list[Array]
    low: Array | None = None
    master: Array | None = None

    @classmethod
    def draw(
        cls, scalars: Scalars, formats: Formats, numel: int, draw: Draw, count: int | None = None
    ) -> Stored:
        """Encoded draws: weight first, then `count` states, none negative that cannot be."""
        names = scalars.names_of(scalars.state_counts[0] if count is None else count)
        weight = draw(numel)
        values = [draw(numel) for _ in names]
        positive = [v if is_signed(n) else np.abs(v) for n, v in zip(names, values, strict=True)]
        return cls.of(formats, names, weight, positive)

    @classmethod
    def of(
        cls,
        formats: Formats,
        names: tuple[str, ...],
        weight: NDArray[np.float32],
        values: list[NDArray[np.float32]],
    ) -> Stored:
        low = None
        stored = reference.encode(weight, formats.weight)
        if formats.master is Master.SPLIT:
            stored, low = reference.split_master(weight)
        master = weight.copy() if formats.master is Master.FP32 else None
        states, scales = list[Array](), list[Array]()
        for name, array in zip(names, values, strict=True):
            if formats.states is StateFormat.INT8:
                half = np.full(array.size, 0x8000, np.uint32)
                codes, scale = reference.encode_int8(array, half, signed=is_signed(name))
                states.append(codes)
                scales.append(scale)
            else:
                kind = Float.FP32 if formats.states is StateFormat.FP32 else Float.BF16
                states.append(reference.encode(array, kind))
        return cls(formats, names, stored, states, scales, low, master)

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, without those that the formats lack."""
        arrays = {"weight": self.weight}
        arrays |= dict(zip(self.names, self.states, strict=True))
        scale_names = [f"scale of {name}" for name in self.names][: len(self.scales)]
        arrays |= dict(zip(scale_names, self.scales, strict=True))
        optional = {"low": self.low, "master": self.master}
        return arrays | {name: array for name, array in optional.items() if array is not None}

    def copy(self) -> Stored:
        return self.moved(0)

    def moved(self, elements: int) -> Stored:
        """A copy whose arrays each start so many elements after an allocation does."""

        def room(array: Array) -> Array:
            fresh = np.empty(array.size + elements, array.dtype)[elements:]
            fresh[:] = array
            return fresh

        return self._mapped(room, room)

    def part(self, lo: int, hi: int) -> Stored:
        """The elements lo .. hi as views; lo is a block boundary if there are blocks."""
        blocks = slice(lo // BLOCK, scale_blocks(hi))
        return self._mapped(lambda array: array[lo:hi], lambda scale: scale[blocks])

    def _mapped(
        self, element_wise: Callable[[Array], Array], block_wise: Callable[[Array], Array]
    ) -> Stored:
        return replace(
            self,
            weight=element_wise(self.weight),
            states=[element_wise(array) for array in self.states],
            scales=[block_wise(array) for array in self.scales],
            low=None if self.low is None else element_wise(self.low),
            master=None if self.master is None else element_wise(self.master),
        )

    def step(
        self, grad: Array | None, scalars: Scalars, noise: Noise | None = NOISE, **more: Any
    ) -> None:
        """`more`: how the kernel runs, and the steps that were missed."""
        self._step(optimizer_step, grad, scalars, noise, **more)

    def reference_step(self, grad: Array, scalars: Scalars, noise: Noise = NOISE) -> None:
        self._step(reference_rules.optimizer_step, grad, scalars, noise)

    def _step(
        self, function: Callable[..., None], grad: Array | None, scalars: Scalars,
        noise: Noise | None, **more: Any,
    ) -> None:  # fmt: skip
        function(
            grad, self.weight, self.states, scalars,
            grad_float=self.formats.grad, weight_float=self.formats.weight,
            state_format=self.formats.states, scales=self.scales,
            low=self.low, master=self.master, noise=noise, **more,
        )  # fmt: skip

    def assert_same(self, other: Stored) -> None:
        """Equal bits in all arrays; NaNs of fp16 weights keep a payload, which is not specified."""
        expected = other.arrays()
        for name, array in self.arrays().items():
            wanted = expected[name]
            if name == "weight" and self.formats.weight is Float.FP16:
                array, wanted = (reference.decode(x, Float.FP16) for x in (array, wanted))
            assert_same(array, wanted, name)


def calm(seed: int) -> Draw:
    """Values as they come up in training."""
    rng = np.random.default_rng(seed)
    return lambda numel: rng.standard_normal(numel).astype(np.float32)


def wild(seed: int) -> Draw:
    """Every kind of value against every other; some blocks without what is not finite."""
    rng = np.random.default_rng(seed)

    def draw(numel: int) -> NDArray[np.float32]:
        values = rng.choice(SPECIAL, numel)
        blocks = np.arange(numel) // BLOCK % 3
        values[(blocks == 1) & ~np.isfinite(values)] = 0.5
        tame = np.clip(np.nan_to_num(values), -1, 1)
        return np.where(blocks == 2, tame, values).astype(np.float32)

    return draw
