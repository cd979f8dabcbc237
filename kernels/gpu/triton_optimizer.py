"""One optimizer step on flat tensors in device memory: the twin of `kernels.cpu.optimizer`.

The rules, formats and random bits are those of `kernels.rules`, `kernels.cpu.convert`,
`kernels.cpu.int8` and `kernels.cpu.noise`, and so are the results, bit for bit (a NaN is a NaN):
which part of a parameter group a GPU steps and which the CPU does not show in the weights.

One pass reads and writes each array once. With states in fp32 or bf16 a program of the kernel is
1024 elements; with 8-bit states it is four blocks of 256 that share a scale each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels.cpu.int8 import BLOCK as CODE_BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.floats import Float
from offload.kernels.gpu.triton_launch import check, fits, float_of, launch, loaded, numel_of
from offload.kernels.rules import Scalars, StateFormat, is_signed
from offload.kernels.variants import NO_GRADIENT, Master, master_of, names_of_states

_BLOCK = 1024
# Eight warps leave four elements to a thread: 16-byte accesses of fp32, and one layout for arrays
# of all widths, so that nothing goes through shared memory. Of 16-bit and 8-bit arrays alone a
# thread takes eight.
_WARPS = {StateFormat.FP32: 8, StateFormat.BF16: 4, StateFormat.INT8: 4}
_FORMATS = {
    torch.float32: StateFormat.FP32,
    torch.bfloat16: StateFormat.BF16,
    torch.uint8: StateFormat.INT8,
}
_CONSTANTS = 8  # of Adam; the other rules have fewer
_NO_NOISE = Noise(0, 0)


def optimizer_step(
    grad: torch.Tensor | None, weight: torch.Tensor, states: Sequence[torch.Tensor],
    scalars: Scalars, *, scales: Sequence[torch.Tensor] = (), low: torch.Tensor | None = None,
    master: torch.Tensor | None = None, noise: Noise | None = None,
) -> None:  # fmt: skip
    """Update `weight`, `states` and what else is given, in place, from `grad`.

    All tensors are (numel,), contiguous, on one device, and do not overlap; dtypes say what they
    hold. `grad` and `weight` are float32, bfloat16 or float16; without `grad` the gradient is +0
    everywhere. `states` are the rule's, in the order of `scalars.states`, all float32, all
    bfloat16, or all uint8 codes of `kernels.cpu.int8` with one float32 tensor in `scales` for each,
    (ceil(numel / 256),); three states with `AdamScalars` are amsgrad (float32 only), and SGD
    without momentum has none.

    The fp32 master of a 16-bit weight is `low` (int16, of a bfloat16 weight) or `master`
    (float32). A bfloat16 weight with neither is rounded stochastically; so are bfloat16 and uint8
    states. All that needs `noise`, of which `first` is the number of element 0 in its group.

    Returns once the work is queued on the current stream; `grad` is left as it was. ValueError,
    before anything is queued, names the argument that does not fit.
    """
    numel, where = weight.numel(), weight.device
    extras = [each for each in (low, master) if each is not None]
    given = [] if grad is None else [grad]
    blocks = -(-numel // CODE_BLOCK)
    key = (
        type(scalars), scalars.flag, weight.dtype, low is None, master is None, len(states),
        len(given), *[each.dtype for each in (*given, *extras, *states, *scales)],
    )  # fmt: skip
    variant = _known.get(key)
    if (
        variant is None
        or not all(fits(each, numel, where) for each in (*given, weight, *extras, *states))
        or not all(fits(each, blocks, where) for each in scales)
    ):
        variant = _known[key] = _checked(grad, weight, states, scalars, scales, low, master)
    if noise is None and variant.draws:
        raise ValueError("noise: expected with stochastic rounding (16- or 8-bit), got None")
    noise = noise or _NO_NOISE
    unused = [weight]  # pointers that are not followed
    tensors = (
        *(given or unused), weight, *(extras or unused), *states, *unused * (3 - len(states)),
        *scales, *unused * (2 - len(scales)),
    )  # fmt: skip
    constants = scalars.constants.tolist()
    constants += [0.0] * (_CONSTANTS - len(constants))
    numbers = numel, noise.key, noise.weight_key, noise.first & 0xFFFFFFFF, *constants
    kernel, programs = loaded("triton_step_kernel", "step_kernel"), -(-numel // _BLOCK)
    launch(kernel, programs, tensors, numbers, variant.constants, variant.num_warps)


@dataclass(frozen=True, slots=True)
class _Variant:
    constants: tuple[int, ...]
    num_warps: int
    draws: bool  # whether something is rounded stochastically


# By the rule, the arrays that there are and their dtypes: all that was found to be right.
_known: dict[tuple[Any, ...], _Variant] = {}


def _checked(
    grad: torch.Tensor | None, weight: torch.Tensor, states: Sequence[torch.Tensor],
    scalars: Scalars, scales: Sequence[torch.Tensor], low: torch.Tensor | None,
    master: torch.Tensor | None,
) -> _Variant:  # fmt: skip
    """The variant to compile the kernel for. ValueError names the argument that does not fit."""
    numel = numel_of("weight", weight)
    weight_float, state_format = float_of("weight", weight), _format_of(states)
    kind = master_of(weight_float, low=low is not None, master=master is not None)
    grad_format = NO_GRADIENT
    if grad is not None:
        grad_format = int(float_of("grad", grad))
        check("grad", grad, grad.dtype, numel, weight)
    check("weight", weight, weight.dtype, numel, weight)
    if low is not None:
        check("low", low, torch.int16, numel, weight)
    if master is not None:
        check("master", master, torch.float32, numel, weight)
    _check_states(weight, states, scales, scalars, state_format, numel)
    constants = (
        int(scalars.rule), scalars.flag, grad_format, int(weight_float), int(kind),
        len(states), bool(states) and is_signed(scalars.states[0]), int(state_format), _BLOCK,
    )  # fmt: skip
    rounded = kind is Master.NONE and weight_float is Float.BF16
    return _Variant(
        constants, _WARPS[state_format], rounded or state_format is not StateFormat.FP32
    )


def _format_of(states: Sequence[torch.Tensor]) -> StateFormat:
    if not states:
        return StateFormat.FP32
    states_format = _FORMATS.get(states[0].dtype)
    if states_format is None:
        raise ValueError(
            f"states: expected dtype float32, bfloat16 or uint8, got {states[0].dtype}"
        )
    return states_format


def _check_states(
    weight: torch.Tensor, states: Sequence[torch.Tensor], scales: Sequence[torch.Tensor],
    scalars: Scalars, state_format: StateFormat, numel: int,
) -> None:  # fmt: skip
    names = names_of_states(scalars, len(states), len(scales), state_format)
    for name, state in zip(names, states, strict=True):
        check(name, state, states[0].dtype, numel, weight)
    blocks = -(-numel // CODE_BLOCK)
    for name, scale in zip(names, scales, strict=bool(scales)):
        check(f"scales of {name}", scale, torch.float32, blocks, weight)
