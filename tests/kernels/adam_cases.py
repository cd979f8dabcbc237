"""A parameter with its optimizer state in any of the kernel's formats, and its reference twin."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offload.kernels.cpu.optimizer import Master, optimizer_step
from offload.kernels.floats import Array, Float, Runner, serial
from offload.kernels.rules import AdamScalars
from tests.kernels import reference

SCALARS = AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37)
SIZES = [0, 1, 7, 15, 16, 17, 127, 128, 129, 1000, 65537]
FORMATS = [
    (grad, weight, master)
    for grad in Float
    for weight, master in [
        (Float.FP32, Master.NONE),
        (Float.BF16, Master.SPLIT),
        (Float.BF16, Master.FP32),
        (Float.FP16, Master.FP32),
    ]
]
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, 1.1754944e-38, 3.4028235e38, -3.4e38,
     3.3961775e38, 1e-20, 1e20, 1.0, -1.0],
    dtype=np.float32,
)  # fmt: skip


def adam_step(
    grad: Array,
    weight: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    scalars: AdamScalars,
    *,
    grad_float: Float,
    weight_float: Float,
    low: Array | None = None,
    master: Array | None = None,
    max_exp_avg_sq: Array | None = None,
    run: Runner = serial,
) -> None:
    """`optimizer_step` with fp32 moments; `max_exp_avg_sq` makes it amsgrad."""
    moments = (exp_avg, exp_avg_sq)
    optimizer_step(
        grad,
        weight,
        moments if max_exp_avg_sq is None else (*moments, max_exp_avg_sq),
        scalars,
        grad_float=grad_float,
        weight_float=weight_float,
        low=low,
        master=master,
        run=run,
    )


@dataclass
class Parameter:
    """Arrays as `adam_step` takes them."""

    weight: Array
    exp_avg: NDArray[np.float32]
    exp_avg_sq: NDArray[np.float32]
    weight_float: Float
    low: NDArray[np.int16] | None = None
    master: NDArray[np.float32] | None = None
    max_exp_avg_sq: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, state: reference.AdamState, weight_float: Float, master: Master) -> "Parameter":
        """Copies of a state in the given formats."""
        fp32 = state.weight
        low = None
        stored = reference.encode(fp32, weight_float)
        if master is Master.SPLIT:
            stored, low = reference.split_master(fp32)
        largest = state.max_exp_avg_sq
        return cls(
            stored,
            state.exp_avg.copy(),
            state.exp_avg_sq.copy(),
            weight_float,
            low,
            fp32.copy() if master is Master.FP32 else None,
            None if largest is None else largest.copy(),
        )

    def arrays(self) -> dict[str, Array]:
        """Those that are there, by name."""
        names = ["weight", "exp_avg", "exp_avg_sq", "low", "master", "max_exp_avg_sq"]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def part(self, lo: int, hi: int) -> "Parameter":
        """The elements lo .. hi, as views."""
        return replace(self, **{name: array[lo:hi] for name, array in self.arrays().items()})

    def moved(self, elements: int) -> "Parameter":
        """A copy whose arrays each start so many elements after an allocation does."""
        parts = {}
        for name, array in self.arrays().items():
            room = np.empty(array.size + elements, array.dtype)[elements:]
            room[:] = array
            parts[name] = room
        return replace(self, **parts)

    def step(
        self, grad: Array, scalars: AdamScalars, grad_float: Float, run: Runner = serial
    ) -> None:
        adam_step(
            grad,
            self.weight,
            self.exp_avg,
            self.exp_avg_sq,
            scalars,
            grad_float=grad_float,
            weight_float=self.weight_float,
            low=self.low,
            master=self.master,
            max_exp_avg_sq=self.max_exp_avg_sq,
            run=run,
        )


def random_state(numel: int, *, amsgrad: bool = False, seed: int = 0) -> reference.AdamState:
    """A state some steps into a training run."""
    rng = np.random.default_rng((seed, numel))
    draws = rng.standard_normal((4, numel)).astype(np.float32)
    largest = draws[3] ** 2 if amsgrad else None
    return reference.AdamState(draws[0], draws[1] * np.float32(0.1), draws[2] ** 2, largest)


def wild_state(numel: int, *, amsgrad: bool = False) -> reference.AdamState:
    """Every kind of value against every other, in random combinations."""
    rng = np.random.default_rng(numel)
    draws = rng.choice(SPECIAL, (4, numel))
    largest = np.abs(draws[3]) if amsgrad else None
    return reference.AdamState(draws[0], draws[1], np.abs(draws[2]), largest)


def random_gradient(numel: int, kind: Float, seed: int = 0) -> Array:
    values = np.random.default_rng((seed, numel, 7)).standard_normal(numel)
    return reference.encode(values.astype(np.float32), kind)


def assert_same(got: Array, expected: Array, what: str = "") -> None:
    """Equal bits; a NaN equals any other."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bits = f"u{got.itemsize}"
    differs = got.view(bits) != expected.view(bits)
    if got.dtype.kind == "f":
        differs &= ~(np.isnan(got) & np.isnan(expected))
    where = np.flatnonzero(differs)[:5]
    assert not where.size, f"{what} differs at {where}: {got[where]} for {expected[where]}"
