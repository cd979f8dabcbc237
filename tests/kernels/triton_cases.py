"""One step's arrays in any format, stepped on the CPU and by the Triton kernel."""

import copy
from dataclasses import dataclass, field

import numpy as np

from offload.kernels.cpu import optimizer
from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.floats import Array, Float
from offload.kernels.gpu import triton_optimizer
from offload.kernels.rules import (
    AdagradScalars,
    AdamScalars,
    LionScalars,
    Scalars,
    SgdScalars,
    StateFormat,
    is_signed,
)
from offload.kernels.variants import Master
from tests.kernels import reference
from tests.kernels.triton_device import get, put
from tests.kernels.values import SPECIAL, assert_same

NOISE = Noise(key=0x9ABCDEF0, weight_key=0x12345678, first=4_294_967_000)  # wraps in 296 elements
RULES: dict[str, Scalars] = {
    "adamw": AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37),
    "adam": AdamScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=1, decoupled=False, maximize=True),
    "lion": LionScalars(1e-4, 0.9, 0.99, 0.1, grad_scale=0.37),
    "adagrad": AdagradScalars(1e-2, 1e-10, 0.01, step=5, lr_decay=0.1, grad_scale=0.37),
    "sgd": SgdScalars(1e-2, 0.0, 0.01, step=2, grad_scale=0.37, maximize=True),
    "momentum": SgdScalars(1e-2, 0.9, 0.01, step=2, dampening=0.1, grad_scale=0.37),
    "nesterov": SgdScalars(1e-2, 0.9, 0.01, step=2, nesterov=True, grad_scale=0.37),
}


@dataclass
class Case:
    """NumPy arrays as `kernels.cpu.optimizer.optimizer_step` takes them."""

    scalars: Scalars
    grad_float: Float
    weight_float: Float
    state_format: StateFormat
    grad: Array | None
    weight: Array
    states: list[Array]
    scales: list[Array] = field(default_factory=list)
    low: Array | None = None
    master: Array | None = None
    noise: Noise | None = NOISE

    def arrays(self) -> dict[str, Array]:
        """All that a step changes, 16-bit floats widened: a NaN there equals any other."""
        arrays = {"weight": reference.decode(self.weight, self.weight_float)}
        for place, state in enumerate(self.states):
            bf16 = self.state_format is StateFormat.BF16
            arrays[f"state {place}"] = reference.decode(state, Float.BF16) if bf16 else state
        arrays |= {f"scales {place}": scale for place, scale in enumerate(self.scales)}
        others = {"low": self.low, "master": self.master}
        return arrays | {name: array for name, array in others.items() if array is not None}

    def on_cpu(self) -> dict[str, Array]:
        """What the CPU's kernel makes of copies of the arrays."""
        twin = copy.deepcopy(self)
        optimizer.optimizer_step(
            twin.grad, twin.weight, twin.states, twin.scalars, grad_float=twin.grad_float,
            weight_float=twin.weight_float, state_format=twin.state_format, scales=twin.scales,
            low=twin.low, master=twin.master, noise=twin.noise,
        )  # fmt: skip
        return twin.arrays()

    def on_device(self) -> dict[str, Array]:
        """What the Triton kernel makes of tensors with copies of the arrays."""
        bf16 = Float.BF16 if self.state_format is StateFormat.BF16 else None
        grad = None if self.grad is None else put(self.grad, self.grad_float)
        weight = put(self.weight, self.weight_float)
        states = [put(state, bf16) for state in self.states]
        scales = [put(scale) for scale in self.scales]
        low = None if self.low is None else put(self.low)
        master = None if self.master is None else put(self.master)
        triton_optimizer.optimizer_step(
            grad, weight, states, self.scalars,
            scales=scales, low=low, master=master, noise=self.noise,
        )  # fmt: skip
        if grad is not None:
            np.testing.assert_array_equal(get(grad), self.grad)
        twin = copy.deepcopy(self)
        twin.weight = get(weight)
        twin.states = [get(state) for state in states]
        twin.scales = [get(scale) for scale in scales]
        twin.low = None if low is None else get(low)
        twin.master = None if master is None else get(master)
        return twin.arrays()

    def check(self) -> None:
        """Both kernels end with the same bits."""
        expected = self.on_cpu()
        got = self.on_device()
        assert got.keys() == expected.keys()
        for name, array in got.items():
            assert_same(array, expected[name], name)


def case(
    scalars: Scalars,
    numel: int,
    *,
    grad_float: Float = Float.BF16,
    weight: tuple[Float, Master] = (Float.BF16, Master.SPLIT),
    states: StateFormat = StateFormat.FP32,
    amsgrad: bool = False,
    wild: bool = False,
) -> Case:
    """Arrays of a parameter some steps into training; `wild`: every kind of value, at random."""
    rng = np.random.default_rng((numel, wild))

    def draw() -> Array:
        if wild:
            return rng.choice(SPECIAL, numel)
        return (rng.standard_normal(numel) * 2.0 ** rng.integers(-12, 2, numel)).astype(np.float32)

    fp32, weight_float = draw(), weight[0]
    stored, low = reference.encode(fp32, weight_float), None
    if weight[1] is Master.SPLIT:
        stored, low = reference.split_master(fp32)
    made = Case(
        scalars, grad_float, weight_float, states,
        reference.encode(draw(), grad_float), stored, [],
        low=low, master=fp32 if weight[1] is Master.FP32 else None,
    )  # fmt: skip
    for name in scalars.names_of(scalars.state_counts[-1 if amsgrad else 0]):
        values = draw() if is_signed(name) else np.abs(draw())
        if states is StateFormat.INT8:
            codes, scales = _codes(rng, numel, wild)
            made.states.append(codes)
            made.scales.append(scales)
        else:
            made.states.append(reference.encode(values, Float(states)))
    return made


def _codes(rng: np.random.Generator, numel: int, wild: bool) -> tuple[Array, Array]:
    """Any bytes, under scales that an encoder can have written or that a state starts with."""
    blocks = optimizer.scale_blocks(numel)
    exponents = rng.integers(100, 115, blocks)
    scales = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    codes = rng.integers(0, 256, numel).astype(np.uint8)
    if wild:
        scales = rng.choice(np.array([0, 2.0**-119, 2.0**113, np.nan, 1], np.float32), blocks)
        codes[np.repeat(~(scales > 0), BLOCK)[:numel]] = 0
    return codes, scales
