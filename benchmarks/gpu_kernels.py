"""Each Triton kernel's bytes per second, against a device-to-device copy of as many bytes.

A kernel that passes over its arrays once cannot be faster than memory. What memory does is shown by
a copy that reads and writes as many bytes as the kernel reads and writes in total, in turn with it.
Kernels that read more than they write may beat a copy by a little: reads are cheaper than writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_machine import timed_on_device
from benchmarks.gpu_parts import say
from offload.bench.record import Kind, Record
from offload.bench.rounds import Timed, measure
from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.floats import norm_blocks
from offload.kernels.gpu import triton_dequantize, triton_gradients, triton_optimizer
from offload.kernels.rules import AdagradScalars, AdamScalars, LionScalars, Scalars, SgdScalars
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.process.child import Parent
from offload.tiers import accelerator
from offload.tiers.units import format_bytes

NUMEL = 1 << 27
_SHARE_OF_MEMORY = 8  # a kernel's arrays take at most this part of what is free
_MAX_PER_ELEMENT = 16  # bytes of arrays
_REPEATS, _ROUNDS = 5, 7

_ADAM = AdamScalars(1e-4, 0.9, 0.95, 1e-8, 0.1, step=2, grad_scale=0.5)
_LION = LionScalars(1e-4, 0.9, 0.99, 0.1, grad_scale=0.5)
_ADAGRAD = AdagradScalars(1e-2, 1e-10, 0.01, step=2, grad_scale=0.5)
_SGD = SgdScalars(1e-2, 0.9, 0.01, step=2, grad_scale=0.5)
_NOISE = Noise(0x9ABCDEF0, 0x12345678)
_SCALE_1 = 0x3F800000  # of a group of codes, as fp32 bits
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class KernelCase:
    """A kernel with the tensors it passes over."""

    name: str
    run: Callable[[], None]
    read: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of one pass; what is read and written back counts twice."""
        return sum(tensor.nbytes for tensor in (*self.read, *self.written))


def run_kernels(_: Mapping[str, Any], parent: Parent) -> None:
    """Measure every case on the current CUDA device. TritonUnavailableError if none can run."""
    device = accelerator.default_device()
    free = accelerator.free_nbytes(device)
    room = free // _SHARE_OF_MEMORY // _MAX_PER_ELEMENT // BLOCK * BLOCK
    numel = min(NUMEL, max(BLOCK, room))
    record = Record("gpu kernels", {"numel": numel, "rounds": _ROUNDS, "repeats": _REPEATS})
    record.notes.append(f"{numel} elements; times are the device's own, {_REPEATS} calls per round")
    for make in MAKERS:
        for case in make(numel, device):
            say(case.name)
            _measure(case, record)
            parent.answer(record.to_dict())


def _measure(case: KernelCase, record: Record) -> None:
    device = (*case.read, *case.written)[0].device
    source = torch.empty(case.nbytes // 2, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    name = f"copy of {format_bytes(case.nbytes)}, beside {case.name}"
    systems = [
        _timed(case.name, Kind.OFFLOAD, case.nbytes, case.run),
        _timed(name, Kind.LIMIT, case.nbytes, copy),
    ]
    measure(record, systems, _ROUNDS, lambda _: None)
    record.compare(case.name, name, "bytes_per_s")


def _timed(name: str, kind: Kind, nbytes: int, work: Callable[[], object]) -> Timed:
    def run() -> dict[str, float]:
        return {"seconds": timed_on_device(work, _REPEATS)}

    return Timed(name, kind, run, {"bytes_per_s": float(nbytes)})


# ---------------------------------------------------------------- the cases
def _normal(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (torch.randn(numel, device=device) * 0.02).to(dtype)


def _step(
    name: str, scalars: Scalars, numel: int, device: torch.device, *,
    weight: torch.dtype = BF16, second: str = "low", states: Sequence[torch.dtype] = (FP32, FP32),
) -> KernelCase:  # fmt: skip
    """One step of a rule; `second` is the array beside the weight: low, master or none."""
    grad, value = _normal(numel, weight, device), _normal(numel, weight, device)
    kept = [torch.zeros(numel, dtype=dtype, device=device) for dtype in states]
    quantized = [state for state in kept if state.dtype == torch.uint8]
    scales = [torch.zeros(-(-numel // BLOCK), device=device) for _ in quantized]
    low = torch.zeros(numel, dtype=torch.int16, device=device) if second == "low" else None
    master = value.float() if second == "master" else None
    run = partial(
        triton_optimizer.optimizer_step, grad, value, kept, scalars,
        scales=scales, low=low, master=master, noise=_NOISE,
    )  # fmt: skip
    beside = [tensor for tensor in (low, master) if tensor is not None]
    # an fp32 master is what the step reads; the 16-bit weight is only written
    updated = (*beside, *kept, *scales) if master is not None else (value, *beside, *kept, *scales)
    written = (value, *updated) if master is not None else updated
    return KernelCase(name, run, (grad, *updated), written)


def _steps(numel: int, device: torch.device) -> Iterator[KernelCase]:
    yield _step("adamw, fp32", _ADAM, numel, device, weight=FP32, second="none")
    yield _step("adamw, split master", _ADAM, numel, device)
    yield _step("adamw, split master, bf16 moments", _ADAM, numel, device, states=(BF16, BF16))
    int8 = (torch.uint8, torch.uint8)
    yield _step("adamw, split master, int8 moments", _ADAM, numel, device, states=int8)
    yield _step("adamw, fp32 master", _ADAM, numel, device, second="master")
    yield _step(
        "adamw, no master, bf16 moments", _ADAM, numel, device, second="none", states=(BF16, BF16)
    )
    yield _step("lion, split master", _LION, numel, device, states=(FP32,))
    yield _step("adagrad, split master", _ADAGRAD, numel, device, states=(FP32,))
    yield _step("sgd with momentum, split master", _SGD, numel, device, states=(FP32,))


def _gradients(numel: int, device: torch.device) -> Iterator[KernelCase]:
    partials = torch.zeros(norm_blocks(numel), dtype=torch.float64, device=device)
    grad = _normal(numel, BF16, device)
    out16, out32 = torch.zeros_like(grad), torch.zeros(numel, device=device)
    g = triton_gradients
    yield KernelCase(
        "gradient copied, with norm", partial(g.copy_gradient, out16, grad, partials),
        (grad,), (out16, partials),
    )  # fmt: skip
    yield KernelCase(
        "gradient added to fp32, with norm", partial(g.add_gradient, out32, grad, partials),
        (grad, out32), (out32, partials),
    )  # fmt: skip


def _dequantizing(numel: int, device: torch.device) -> Iterator[KernelCase]:
    for weights in map(WeightFormat, QuantType):
        shape = (weights.codes_nbytes(numel),)
        groups = (numel // weights.group_size,)
        words = torch.full(groups, _SCALE_1, dtype=torch.int32, device=device)
        codes = torch.randint(1, 256, shape, device=device, dtype=torch.uint8)
        out = torch.zeros(numel, dtype=BF16, device=device)
        dequantize = partial(triton_dequantize.dequantize_weights, words, codes, out, weights)
        yield KernelCase(f"{weights.name} weights to bf16", dequantize, (words, codes), (out,))


MAKERS: tuple[Callable[[int, torch.device], Iterator[KernelCase]], ...] = (
    _steps, _gradients, _dequantizing,
)  # fmt: skip
