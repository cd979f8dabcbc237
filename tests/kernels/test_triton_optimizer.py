"""The Triton optimizer kernel ends with the bits of the CPU's, for every rule and format."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from offload.kernels.floats import Float
from offload.kernels.gpu.triton_optimizer import optimizer_step
from offload.kernels.rules import AdamScalars, MuonScalars, Scalars, SgdScalars, StateFormat
from offload.kernels.variants import Master
from tests.kernels import triton_device
from tests.kernels.step_cases import MUON_WEIGHTS, NOISE, RULES, UNUSUAL, WEIGHTS
from tests.kernels.triton_cases import case
from tests.kernels.triton_device import DEVICE, launches, zeros

__all__ = ["launches"]
pytestmark = [pytest.mark.sample(3), *triton_device.MARKS]

ADAMW = RULES["adamw"]
FORMATS = [(grad, *weight) for grad in Float for weight in WEIGHTS]
MORE = [
    SgdScalars(1e-2, 0.9, 0.0, step=1, dampening=0.5), MUON_WEIGHTS,
    MuonScalars(1e-2, 0.1, 0.3, False, 2.0, -1.5, 0.5, 1e-7, 1, True),
]  # fmt: skip
ODD = 1337  # one whole program and a ragged one; one short block of the 8-bit code


@pytest.mark.parametrize("states", list(StateFormat))
@pytest.mark.parametrize(("grad", "weight", "master"), FORMATS)
def test_every_format_matches_the_cpu(
    grad: Float, weight: Float, master: Master, states: StateFormat
) -> None:
    for wild in (False, True):
        made = case(
            ADAMW, ODD, grad_float=grad, weight=(weight, master), states=states, wild=wild
        )  # fmt: skip
        made.check()


@pytest.mark.parametrize("states", list(StateFormat))
@pytest.mark.parametrize("weight", [(Float.BF16, Master.SPLIT), (Float.BF16, Master.NONE)])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])
def test_every_rule_matches_the_cpu(
    rule: str, weight: tuple[Float, Master], states: StateFormat
) -> None:
    case(RULES[rule], ODD, weight=weight, states=states).check()
    case(RULES[rule], ODD, weight=weight, states=states, wild=True).check()


@pytest.mark.parametrize("states", list(StateFormat))
@pytest.mark.parametrize("rule", RULES)
def test_a_step_without_a_gradient_matches_the_cpu(rule: str, states: StateFormat) -> None:
    weight = (Float.BF16, Master.NONE) if rule == "lion" else (Float.BF16, Master.SPLIT)
    for wild in (False, True):
        replace(case(RULES[rule], ODD, weight=weight, states=states, wild=wild), grad=None).check()


@pytest.mark.parametrize("decoupled", [False, True])
def test_amsgrad_matches_the_cpu(decoupled: bool) -> None:
    assert isinstance(ADAMW, AdamScalars)
    scalars = replace(ADAMW, decoupled=decoupled)
    for wild in (False, True):
        case(scalars, ODD, amsgrad=True, wild=wild).check()


@pytest.mark.parametrize("states", list(StateFormat))
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 1023, 1024, 1025, 2048])
def test_every_size_matches_the_cpu(numel: int, states: StateFormat) -> None:
    case(ADAMW, numel, states=states).check()


@pytest.mark.parametrize("scalars", [*UNUSUAL, *MORE])
def test_unusual_scalars_match_the_cpu(scalars: Scalars) -> None:
    case(scalars, 1025).check()


def test_random_bits_follow_an_element_not_its_place() -> None:
    numel, cut = 1600, 512
    whole = case(ADAMW, numel, weight=(Float.BF16, Master.NONE), states=StateFormat.INT8)
    bounds = ((0, cut), (cut, numel))
    parts = [
        replace(whole, grad=whole.grad[lo:hi], stored=whole.stored.part(lo, hi))
        for lo, hi in bounds
    ]
    parts[1].noise = NOISE.at(NOISE.first + cut)
    first, second = (part.on_device() for part in parts)
    for name, array in whole.on_device().items():
        np.testing.assert_array_equal(np.concatenate([first[name], second[name]]), array, name)
    parts[1].noise = NOISE
    assert (parts[1].on_device()["weight"] != second["weight"]).any()


def fp32_step(**other: object) -> None:
    """A step that is fine but for the arguments given."""
    grad, weight, *states = (zeros(8, Float.FP32) for _ in range(4))
    arguments = {"grad": grad, "weight": weight, "states": states, "scalars": ADAMW} | other
    optimizer_step(**arguments)  # type: ignore[arg-type]


CODES = torch.zeros(8, dtype=torch.uint8, device=DEVICE)
ONE = zeros(1, Float.FP32)
FP32 = zeros(8, Float.FP32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad": FP32[:7]}, r"grad: expected shape \(8,\), got \(7,\)"),
        ({"grad": FP32.double()}, "grad: expected dtype float32, bfloat16, float16, got float64"),
        ({"weight": FP32.view(2, 4)}, r"weight: expected a 1-D tensor, got shape \(2, 4\)"),
        ({"states": [FP32]}, "states: expected exp_avg, exp_avg_sq, got 1 arrays"),
        ({"states": [FP32, FP32.half()]}, "exp_avg_sq: expected dtype float32, got float16"),
        ({"states": [FP32.half()] * 2}, "states: expected dtype float32, bfloat16 or uint8"),
        ({"states": [zeros(16, Float.FP32)[::2], FP32]}, "exp_avg: expected a contiguous tensor"),
        ({"states": [CODES] * 2}, "scales: expected 2 for 2 INT8 states, got 0"),
        ({"states": [CODES] * 2, "scales": [ONE, FP32]}, r"scales of exp_avg_sq: expected shape"),
        ({"states": [CODES] * 2, "scales": [ONE, ONE]}, "noise: expected"),
        ({"scales": [ONE, ONE]}, "scales: expected 0 for 2 FP32 states, got 2"),
        ({"states": [CODES] * 3, "scales": [ONE] * 3}, "amsgrad needs FP32 states, got INT8"),
        ({"scalars": RULES["sgd"]}, r"states: expected none \(momentum is 0\), got 2"),
        ({"low": CODES}, "an fp32 weight is its own master"),
        ({"weight": FP32.half()}, "an FP16 weight needs a master, got neither"),
        ({"weight": FP32.half(), "low": CODES}, "only a BF16 weight can be split, got FP16"),
        ({"weight": FP32.bfloat16(), "low": FP32}, "low: expected dtype int16, got float32"),
        ({"weight": FP32.bfloat16()}, "noise: expected"),
        ({"low": CODES, "master": FP32}, "expected one of them, got both"),
        ({"grad": torch.zeros(8, device="meta")}, "grad: expected a tensor on .*, got one on meta"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp32_step(**arguments)
