"""Undoable steps: the bits of `optimizer_step`, and back to the very bits from before."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from offload.kernels.cpu.undo import undo_step, undoable_step
from offload.kernels.cpu.undo_code import SECTION, can_undo, code_numel
from offload.kernels.floats import Array, Float, Runner, serial
from offload.kernels.rules import AdamScalars, Rule, Scalars, StateFormat
from offload.kernels.variants import Master, Variant
from tests.kernels import reference
from tests.kernels.step_cases import RULES, WEIGHTS, Formats, Stored, calm, wild

FORMATS = [
    Formats(grad, weight, master)
    for grad in Float
    for weight, master in WEIGHTS
    if weight is Float.FP32 or master is not Master.NONE
]
SAMPLE = [FORMATS[n] for n in (0, 5, 10, 3)]  # each weight, each gradient
ADAM = AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=20, grad_scale=0.37)
SCALARS = [
    ADAM,
    replace(ADAM, step=1),
    replace(ADAM, lr=0.0),
    replace(ADAM, lr=1.0, weight_decay=1.0),  # nothing of p is kept
    replace(ADAM, lr=-1.0, weight_decay=3e38),
    replace(ADAM, weight_decay=0.0, eps=0.0, maximize=True),
    replace(ADAM, beta1=0.0),
    replace(ADAM, beta2=0.0),
    replace(ADAM, beta1=0.0, beta2=0.0, step=1),
    replace(ADAM, beta1=1 - 1e-9, beta2=1 - 1e-9),  # 1 in fp32
    replace(ADAM, beta1=0.3, beta2=0.5, eps=1e-30),
    replace(ADAM, grad_scale=0.0),
    replace(ADAM, grad_scale=2.0**-130),
    replace(ADAM, grad_scale=3e38),
]
Draw = Callable[[int], Array]


def trained(rng: np.random.Generator, scale: float = 1e-2) -> Draw:
    """What is drawn in turn: gradients, weights, m and v as in a training."""
    sizes = iter([scale, 0.02, 0.2 * scale, 0.3 * scale**2])
    return lambda numel: (next(sizes) * rng.standard_normal(numel)).astype(np.float32)


def any_bits(rng: np.random.Generator) -> Draw:
    """NaNs of all payloads, subnormal and huge numbers, zeros of both signs."""
    return lambda numel: rng.integers(0, 2**32, numel, np.uint32).view(np.float32)


def patched(rng: np.random.Generator) -> Draw:
    """As in a training, but for a few elements of any kind."""
    usual, odd, kinds = trained(rng), any_bits(rng), wild(int(rng.integers(99)))

    def draw(numel: int) -> Array:
        values, pick = usual(numel), rng.random(numel)
        return np.where(pick < 0.01, odd(numel), np.where(pick < 0.02, kinds(numel), values))

    return draw


def tiny(rng: np.random.Generator) -> Draw:
    return lambda numel: rng.integers(-9, 9, numel).astype(np.float32) * np.float32(1e-45)


DRAWS = [
    trained, patched, any_bits, tiny, lambda rng: wild(int(rng.integers(99))),
    lambda rng: trained(rng, 1e-20), lambda rng: trained(rng, 1e15), lambda rng: trained(rng, 0.0),
]  # fmt: skip


def drawn(formats: Formats, draw: Draw, numel: int) -> tuple[Array, Stored]:
    grad = reference.encode(draw(numel), formats.grad)
    return grad, Stored.draw(ADAM, formats, numel, draw)


def call(
    function: Callable[..., bool | None], stored: Stored, grad: Array | None, scalars: Scalars,
    code: Array, run: Runner = serial,
) -> bool | None:  # fmt: skip
    formats = stored.formats
    return function(
        grad, stored.weight, stored.states, scalars, grad_float=formats.grad,
        weight_float=formats.weight, code=code, low=stored.low, master=stored.master, run=run,
    )  # fmt: skip


def assert_bits(got: Stored, expected: Stored) -> None:
    """Equal bits, of NaNs, too."""
    wanted = expected.arrays()
    for name, array in got.arrays().items():
        bits = f"u{array.itemsize}"
        where = np.flatnonzero(array.view(bits) != wanted[name].view(bits))
        assert not where.size, f"{name} differs at {where[:5]} of {array.size}"


def check(
    grad: Array, stored: Stored, scalars: Scalars, run: Runner = serial, back: Runner = serial
) -> bool:
    """Make a step and undo it; return whether it was made."""
    before, stepped = stored.copy(), stored.copy()
    stepped.step(grad, scalars, None)
    code = np.full(code_numel(stored.weight.size), -0x55AA55AB, np.int32)  # which may hold anything
    given = grad if bytes(grad).strip(b"\0") else None
    made = call(undoable_step, stored, given, scalars, code, run)
    if made:
        stored.assert_same(stepped)
        call(undo_step, stored, given, scalars, code, back)
    assert_bits(stored, before)
    return bool(made)


@pytest.mark.parametrize("number", range(10))
def test_any_step_of_anything_is_undone_or_not_made(number: int, long: bool) -> None:
    made = 0
    count = 1000 if long else 60
    for seed in range(count):
        rng = np.random.default_rng([number, seed])
        choice = FORMATS if long else SAMPLE
        formats = choice[seed % len(choice)]
        scalars = SCALARS[rng.integers(len(SCALARS)) if rng.random() < 0.7 else 0]
        scalars = replace(scalars, decoupled=bool(rng.random() < 0.7))
        numel = int(rng.choice([0, 1, 17, 127, 128, 300, 1301, 4099, 20_000]))
        grad, stored = drawn(formats, DRAWS[rng.integers(len(DRAWS))](rng), numel)
        if rng.random() < 0.3:  # a gradient of another kind
            grad = reference.encode(DRAWS[rng.integers(len(DRAWS))](rng)(numel), formats.grad)
        if rng.random() < 0.05:
            grad[:] = 0
        if formats.weight is not Float.FP32:  # not the master, rounded; or halves of any NaN
            odd = rng.random(numel) < 0.02
            stored.weight[odd] = rng.integers(0, 2**16, int(odd.sum()))
        made += check(grad, stored, scalars)
    assert count / 3 < made < count


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_steps_of_a_training_have_room(formats: Formats, long: bool) -> None:
    if not long and formats not in SAMPLE:
        pytest.skip("each weight with one gradient: --long has all")
    numel = SECTION + 4099
    _, stored = drawn(formats, trained(np.random.default_rng(3)), numel)
    for state in stored.states:
        state[:] = 0
    for number in range(1, 31):
        grad = reference.encode(1e-3 * calm(number)(numel), formats.grad)
        scalars = replace(ADAM, lr=1e-4, step=number)
        if number in (1, 5, 20, 30):
            assert check(grad, stored, scalars)
        stored.step(grad, scalars, None)


def test_threads_change_nothing_nor_does_a_section_that_needs_the_room_of_others(
    threads: Runner,
) -> None:
    grad, stored = drawn(Formats(), trained(np.random.default_rng(6)), 6 * SECTION + 77)
    stored.states[0][SECTION : SECTION + 10_000] *= np.float32(1e-20)  # long without gradients
    for run, back in ((threads, serial), (serial, threads), (threads, threads)):
        assert check(grad, stored, ADAM, run, back)


@pytest.mark.parametrize("place", [0, 2, 5])
def test_where_a_section_has_no_room_all_are_as_before(place: int, threads: Runner) -> None:
    grad, stored = drawn(Formats(), trained(np.random.default_rng(7)), 6 * SECTION)
    for state in stored.states:
        state[place * SECTION : (place + 1) * SECTION] *= np.float32(1e-20)
    assert not check(grad, stored, ADAM, serial)
    assert not check(grad, stored, ADAM, threads)


def test_what_can_be_undone() -> None:
    variant = Variant(Rule.ADAM, True, None, Float.BF16, Master.SPLIT, StateFormat.FP32, 2)
    assert all(can_undo(replace(variant, weight=f.weight, master=f.master)) for f in FORMATS)
    for other in ({"master": Master.NONE}, {"states": StateFormat.BF16}, {"state_count": 3}):
        assert not can_undo(replace(variant, **other))  # type: ignore[arg-type]
    assert not can_undo(replace(variant, rule=Rule.LION))


STATE = np.zeros(300, np.float32)


@pytest.mark.parametrize("function", [undoable_step, undo_step])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scalars": RULES["lion"], "states": [STATE]}, "no step of .*LION"),
        ({"scalars": RULES["sgd"], "states": []}, "no step of .*SGD"),
        ({"states": [STATE] * 3}, "no step of .*state_count=3"),
        ({"low": None}, "no step of .*NONE"),
        ({"states": [np.zeros(300, np.uint16)] * 2}, "exp_avg: expected dtype float32"),
        ({"code": np.zeros(code_numel(300), np.int64)}, "code: expected dtype int32"),
        ({"code": np.zeros(code_numel(300) - 1, np.int32)}, "code: expected shape"),
        ({"grad": np.zeros(299, np.uint16)}, "grad: expected shape"),
    ],
)
def test_a_bad_argument_is_named(
    function: Callable[..., object], arguments: dict[str, object], message: str
) -> None:
    usual: dict[str, object] = {
        "grad": np.zeros(300, np.uint16), "weight": np.zeros(300, np.uint16),
        "states": [STATE] * 2, "scalars": ADAM, "low": np.zeros(300, np.int16),
        "code": np.zeros(code_numel(300), np.int32), "grad_float": Float.BF16,
        "weight_float": Float.BF16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        function(**(usual | arguments))
