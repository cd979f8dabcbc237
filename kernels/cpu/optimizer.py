"""An optimizer's step on flat arrays: one pass from the gradient to the new weight.

The pass reads a gradient in fp32, bf16 or fp16, scales it (loss unscaling times clip coefficient,
one number), updates the rule's states and the weight, and writes the weight in its own format.
Which rule follows from the type of the scalars; `kernels.rules` has their mathematics and what is
guaranteed about bits. The fp32 master of a 16-bit weight is one of (`Master`):

    NONE   the weight is fp32 itself, or bf16 rounded stochastically
    SPLIT  the bf16 weight is the high half of the master, an int16 array the low half:
           bits = (high << 16) + low
    FP32   an array of its own; the bf16 or fp16 weight is only written

Bytes of memory moved per parameter by Adam with a bf16 gradient and weight (fp32 for the first):

    states              master NONE, fp32   SPLIT   FP32   NONE, bf16
    FP32                               28      26     28          22
    BF16                               20      18     20          14
    INT8, 1.02 each                    16      14     16          10

Steps that were missed can be made before, in the same pass (`Missed`): each with a gradient of
zeros and its own numbers, with the bits that one pass per step would have given, in up to half of
the time (benchmarks/records/kernels.md).

With a split or fp32 master and FP32 states the results are exact in the sense that they agree with
an fp32 optimizer's; weights are rounded to nearest even on the way out (`kernels.cpu.convert`).
BF16 and INT8 states and a bf16 weight without a master are approximations, whose rounding is
stochastic and reproducible (`kernels.cpu.noise`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.cpu.step_loop import ARGUMENTS, KEY, NUMEL, SCALES, replay_loop, step_loop
from offload.kernels.floats import Array, Float, Runner, check_input, check_output, numel_of, serial
from offload.kernels.rules import Scalars, StateFormat
from offload.kernels.variants import Master, master_of, names_of_states, variant_code

_FP32 = np.dtype(np.float32)
_INT16 = np.dtype(np.int16)
_STATE_DTYPES = (_FP32, np.dtype(np.uint16), np.dtype(np.uint8))
_SILENT = Noise(0, 0)


@dataclass(frozen=True, slots=True)
class Missed:
    """A step that was not made when it was due, because its gradient was zero."""

    scalars: Scalars
    noise: Noise | None = None


def scale_blocks(numel: int) -> int:
    """The number of scales of an 8-bit state of `numel` elements."""
    return -(-numel // BLOCK)


def optimizer_step(
    grad: Array | None, weight: Array, states: Sequence[Array], scalars: Scalars, *,
    grad_float: Float, weight_float: Float, state_format: StateFormat = StateFormat.FP32,
    scales: Sequence[Array] = (), low: Array | None = None, master: Array | None = None,
    noise: Noise | None = None, missed: Sequence[Missed] = (), run: Runner = serial,
) -> None:  # fmt: skip
    """Update `weight`, the states and what else is given, in place, from `grad`.

    All arrays are contiguous and do not overlap; all but `scales` are (numel,). `grad` and `weight`
    hold what `grad_float` and `weight_float` say (16-bit floats as uint16 bits); without `grad` the
    gradient is +0 everywhere. `missed` are steps to be made before this one, the oldest first, with
    that gradient and the same rule, flag and states. `states` are those
    that `scalars.names_of` lists: fp32, uint16 bits of bf16, or uint8 codes,
    by `state_format`. For INT8 `scales` has one fp32 array (scale_blocks(numel),) per state, and
    the arrays must start on a block boundary of what they are a part of. Three states with
    `AdamScalars` make it amsgrad, in FP32 only. An fp32 weight takes no master. A bf16 weight takes
    `low` (int16), `master` (fp32) or neither, an fp16 weight needs `master`. Whatever is rounded
    stochastically (BF16 and INT8 states, a bf16 weight without master) needs `noise`.

    Blocks until `run` has covered everything; it is given a number of elements, with INT8 states a
    number of blocks. `grad` is left as it was. ValueError, before anything is written, names the
    argument that does not fit.
    """
    code, arguments = step_arguments(
        grad, weight, states, scalars, noise,
        grad_float=grad_float, weight_float=weight_float, state_format=state_format,
        scales=scales, low=low, master=master,
    )  # fmt: skip
    for step in missed:
        _check_alike(step, scalars, noise)
    count = scale_blocks(len(weight)) if state_format is StateFormat.INT8 else len(weight)
    # The kernel knows addresses only: the arrays are alive because this call is not over.
    if missed:
        run(_replay(code, arguments, missed, scalars), count)
    else:
        run(partial(step_loop(code), arguments, scalars.constants), count)


def step_arguments(
    grad: Array | None, weight: Array, states: Sequence[Array], scalars: Scalars,
    noise: Noise | None = None, *, grad_float: Float, weight_float: Float,
    state_format: StateFormat, scales: Sequence[Array] = (), low: Array | None,
    master: Array | None,
) -> tuple[int, Array]:  # fmt: skip
    """The code of the variant and the arguments of its kernel, which are addresses: the arrays must
    live longer. ValueError names the argument that does not fit."""
    numel = numel_of("weight", weight)
    kind = master_of(weight_float, low=low is not None, master=master is not None)
    if grad is not None:
        check_input("grad", grad, grad_float.storage, numel)
    check_output("weight", weight, weight_float.storage, numel)
    extra = _check_extra(weight, low, master, numel)
    _check_states(states, scales, scalars, state_format, numel)
    rounds = state_format is not StateFormat.FP32 and len(states) > 0
    if noise is None:
        if rounds or (kind is Master.NONE and weight_float is not Float.FP32):
            raise ValueError("noise: stochastic rounding needs it, got None")
        noise = _SILENT
    code = variant_code(
        scalars.rule, None if grad is None else grad_float, weight_float, kind, state_format,
        len(states), flag=scalars.flag,
    )  # fmt: skip
    arrays = (weight if grad is None else grad, weight, extra, *states)
    values = [0] * ARGUMENTS
    values[: len(arrays)] = [_address(array) for array in arrays]
    values[SCALES : SCALES + len(scales)] = [_address(array) for array in scales]
    values[KEY:] = *_noise(noise), numel
    return code, np.array(values, dtype=np.int64)


def _noise(noise: Noise) -> tuple[int, int, int]:
    return noise.key, noise.weight_key, noise.first & 0xFFFFFFFF


def _replay(
    code: int, last: Array, missed: Sequence[Missed], scalars: Scalars
) -> Callable[[int, int], None]:
    """The body that makes all steps; `last` are the arguments of the last step."""
    rows = np.tile(last, (len(missed) + 1, 1))
    rows[:-1, KEY:NUMEL] = [_noise(step.noise or _SILENT) for step in missed]
    constants = np.stack([*(step.scalars.constants for step in missed), scalars.constants])
    return partial(replay_loop(code), rows, constants)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _check_extra(weight: Array, low: Array | None, master: Array | None, numel: int) -> Array:
    """The other array of a master; `weight` where there is none."""
    if low is not None:
        check_output("low", low, _INT16, numel)
        return low
    if master is not None:
        check_output("master", master, _FP32, numel)
        return master
    return weight


def _check_alike(missed: Missed, scalars: Scalars, noise: Noise | None) -> None:
    """Raise ValueError unless one compiled loop can make both steps."""
    if missed.scalars.loop != scalars.loop:
        raise ValueError(f"missed: expected steps as {scalars}, got {missed.scalars}")
    if missed.noise is None and noise is not None:
        raise ValueError("missed: expected the noise of each step, got None")


def _check_states(
    states: Sequence[Array], scales: Sequence[Array], scalars: Scalars, state_format: StateFormat,
    numel: int,
) -> None:  # fmt: skip
    names = names_of_states(scalars, len(states), len(scales), state_format)
    for name, array in zip(names, states, strict=True):
        check_output(name, array, _STATE_DTYPES[state_format], numel)
    for name, array in zip(names, scales, strict=bool(scales)):
        check_output(f"scale of {name}", array, _FP32, scale_blocks(numel))
