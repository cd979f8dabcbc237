"""The optimizer rules in plain NumPy: in fp32 bit for bit.

`optimizer_step` is the kernel's twin on stored formats: same arguments, same bits. `step` is the
rule alone, on fp32 values.
"""

from collections.abc import Sequence

import numpy as np

from offload.kernels.cpu.noise import Noise
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
from tests.kernels import reference
from tests.kernels.reference import F32, AdamState, fma

_ONE = np.float32(1)


def optimizer_step(
    grad: Array,
    weight: Array,
    states: Sequence[Array],
    scalars: Scalars,
    *,
    grad_float: Float,
    weight_float: Float,
    state_format: StateFormat = StateFormat.FP32,
    scales: Sequence[Array] = (),
    low: Array | None = None,
    master: Array | None = None,
    noise: Noise | None = None,
) -> None:
    """Update in place what `kernels.cpu.optimizer.optimizer_step` updates. Unchecked, slow."""
    names = scalars.states[: len(states)]
    p = _weight(weight, weight_float, low, master)
    old = [_decoded(name, place, states, scales, state_format) for place, name in enumerate(names)]
    p, new = step(scalars, reference.decode(grad, grad_float), p, old)
    for place, name in enumerate(names):
        _store_state(name, place, new[place], states, scales, state_format, noise)
    if low is not None:
        weight[:], low[:] = reference.split_master(p)
    elif master is None and weight_float is Float.BF16:
        assert noise is not None
        bits = reference.random_bits(noise.weight_key, noise.first, p.size)
        weight[:] = reference.round_bf16(p, bits >> 16)
    else:
        weight[:] = reference.encode(p, weight_float)
    if master is not None:
        master[:] = p


def step(
    scalars: Scalars, grad: F32, weight: F32, states: Sequence[F32]
) -> tuple[F32, Sequence[F32]]:
    """One step in fp32, operation by operation: the new weight and states. Pure."""
    if isinstance(scalars, AdamScalars):
        after = reference.adam_step(AdamState(weight, *states), grad, scalars)
        return after.weight, _states_of(after)
    with np.errstate(all="ignore"):
        if isinstance(scalars, LionScalars):
            return _lion(scalars, grad, weight, states[0])
        if isinstance(scalars, AdagradScalars):
            return _adagrad(scalars, grad, weight, states[0])
        if isinstance(scalars, MuonScalars):
            return _muon(scalars, grad, weight, states[0])
        if isinstance(scalars, MuonWeightScalars):
            g = grad * _scale(scalars)
            return fma(np.float32(scalars.step_size), g, weight * np.float32(scalars.decay)), []
        return _sgd(scalars, grad, weight, states)


def _lion(s: LionScalars, grad: F32, p: F32, m: F32) -> tuple[F32, Sequence[F32]]:
    c1, c2 = np.float32(1 - s.beta1), np.float32(1 - s.beta2)
    g = grad * _scale(s)
    p = p * np.float32(1 - s.lr * s.weight_decay)
    t = fma(c1, g, fma(-c1, m, m))
    u = np.where(t > 0, np.float32(1), np.where(t < 0, np.float32(-1), t))
    p = fma(np.float32(-s.lr), u, p)
    return p, [fma(c2, g, fma(-c2, m, m))]


def _adagrad(s: AdagradScalars, grad: F32, p: F32, total: F32) -> tuple[F32, Sequence[F32]]:
    g = fma(np.float32(s.weight_decay), p, grad * _scale(s))
    total = fma(g, g, total)
    denominator = np.sqrt(total) + np.float32(s.eps)
    minus_rate = np.float32(-(s.lr / (1 + (s.step - 1) * s.lr_decay)))
    return fma(minus_rate, g / denominator, p), [total]


def _sgd(s: SgdScalars, grad: F32, p: F32, states: Sequence[F32]) -> tuple[F32, Sequence[F32]]:
    g = fma(np.float32(s.weight_decay), p, grad * _scale(s))
    minus_lr, momentum = np.float32(-s.lr), np.float32(s.momentum)
    if not states:
        return fma(minus_lr, g, p), []
    kept = np.float32(1.0 if s.step == 1 else 1 - s.dampening)
    buffer = fma(momentum, states[0], kept * g)
    g = fma(momentum, buffer, g) if s.nesterov else buffer
    return fma(minus_lr, g, p), [buffer]


def _muon(s: MuonScalars, grad: F32, p: F32, m: F32) -> tuple[F32, Sequence[F32]]:
    g = grad * _scale(s)
    m = _lerp(m, g, np.float32(1 - s.momentum))
    return fma(_ONE, _lerp(g, m, np.float32(s.momentum)) if s.nesterov else m, p * 0), [m]


def _lerp(a: F32, b: F32, weight: np.float32) -> F32:
    """torch.lerp, which counts from the nearer end."""
    k, e = (weight, np.float32(0)) if weight < 0.5 else (weight - _ONE, _ONE)
    return fma(k, b - a, fma(e, b, fma(-e, a, a)))


def _states_of(state: AdamState) -> list[Array]:
    largest = [] if state.max_exp_avg_sq is None else [state.max_exp_avg_sq]
    return [state.exp_avg, state.exp_avg_sq, *largest]


def _scale(scalars: Scalars) -> np.float32:
    return np.float32(-scalars.grad_scale if scalars.maximize else scalars.grad_scale)


def _weight(weight: Array, kind: Float, low: Array | None, master: Array | None) -> F32:
    if low is not None:
        return reference.join_master(weight, low)
    return reference.decode(weight, kind) if master is None else master.copy()


def _decoded(
    name: str, place: int, states: Sequence[Array], scales: Sequence[Array], kind: StateFormat
) -> F32:
    if kind is StateFormat.INT8:
        return reference.decode_int8(states[place], scales[place], signed=is_signed(name))
    return reference.decode(states[place], Float.BF16 if kind is StateFormat.BF16 else Float.FP32)


def _store_state(
    name: str,
    place: int,
    values: F32,
    states: Sequence[Array],
    scales: Sequence[Array],
    kind: StateFormat,
    noise: Noise | None,
) -> None:
    if kind is StateFormat.FP32:
        states[place][:] = values
        return
    assert noise is not None
    bits = reference.random_bits(noise.key, noise.first, values.size)
    halves = bits & 0xFFFF if place else bits >> 16
    if kind is StateFormat.BF16:
        states[place][:] = reference.round_bf16(values, halves)
    else:
        codes = reference.encode_int8(values, halves, signed=is_signed(name))
        states[place][:], scales[place][:] = codes
