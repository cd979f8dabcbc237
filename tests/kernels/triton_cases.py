"""One step's arrays in any format, stepped on the CPU and by the Triton kernel."""

from dataclasses import dataclass, replace

import numpy as np

from offload.kernels.cpu import optimizer
from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.floats import Array, Float
from offload.kernels.gpu import triton_optimizer
from offload.kernels.rules import Scalars, StateFormat, is_signed
from offload.kernels.variants import Master
from tests.kernels import reference
from tests.kernels.step_cases import NOISE, Formats, Stored
from tests.kernels.triton_device import get, put
from tests.kernels.values import SPECIAL, assert_same


@dataclass
class Case:
    scalars: Scalars
    grad: Array | None
    stored: Stored
    noise: Noise | None = NOISE

    def on_cpu(self) -> dict[str, Array]:
        """What the CPU's kernel makes of copies of the arrays."""
        twin = self.stored.copy()
        twin.step(self.grad, self.scalars, self.noise)
        return widened(twin)

    def on_device(self) -> dict[str, Array]:
        """What the Triton kernel makes of tensors with copies of the arrays."""
        own, formats = self.stored, self.stored.formats
        bf16 = Float.BF16 if formats.states is StateFormat.BF16 else None
        grad = None if self.grad is None else put(self.grad, formats.grad)
        weight = put(own.weight, formats.weight)
        states = [put(state, bf16) for state in own.states]
        scales = [put(scale) for scale in own.scales]
        low = None if own.low is None else put(own.low)
        master = None if own.master is None else put(own.master)
        triton_optimizer.optimizer_step(
            grad, weight, states, self.scalars,
            scales=scales, low=low, master=master, noise=self.noise,
        )  # fmt: skip
        if grad is not None:
            np.testing.assert_array_equal(get(grad), self.grad)
        return widened(
            replace(
                own, weight=get(weight), states=[get(state) for state in states],
                scales=[get(scale) for scale in scales], low=None if low is None else get(low),
                master=None if master is None else get(master),
            )
        )  # fmt: skip

    def check(self) -> None:
        expected = self.on_cpu()
        got = self.on_device()
        assert got.keys() == expected.keys()
        for name, array in got.items():
            assert_same(array, expected[name], name)


def widened(stored: Stored) -> dict[str, Array]:
    """All that a step changes, 16-bit floats widened: a NaN there equals any other."""
    arrays, formats = stored.arrays(), stored.formats
    arrays["weight"] = reference.decode(stored.weight, formats.weight)
    if formats.states is StateFormat.BF16:
        arrays |= {name: reference.decode(arrays[name], Float.BF16) for name in stored.names}
    return arrays


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

    fp32, grad = draw(), reference.encode(draw(), grad_float)
    names = scalars.names_of(scalars.state_counts[-1 if amsgrad else 0])
    values = [draw() if is_signed(name) else np.abs(draw()) for name in names]
    made = Stored.of(Formats(grad_float, *weight, states), names, fp32, values)
    if states is StateFormat.INT8:
        drawn = [_codes(rng, numel, wild) for _ in names]
        made.states, made.scales = ([pair[n] for pair in drawn] for n in (0, 1))
    return Case(scalars, grad, made)


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
