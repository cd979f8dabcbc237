"""The kernel rooflines count the bytes that the kernels really pass over."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_kernels import MAKERS, KernelCase
from tests.kernels import triton_device
from tests.kernels.triton_device import DEVICE, launches

__all__ = ["launches"]
pytestmark = triton_device.MARKS

NUMEL = 4096
# bytes per element; 8 more per 1024 for norms, 4 per 256 for scales (counted with weights' codes)
TRAFFIC = {
    "adamw, fp32": 28, "adamw, split master": 26, "adamw, split master, bf16 moments": 18,
    "adamw, split master, int8 moments": 14, "adamw, fp32 master": 28,
    "adamw, no master, bf16 moments": 14, "lion, split master": 18, "adagrad, split master": 18,
    "sgd with momentum, split master": 18, "gradient copied, with norm": 4,
    "gradient added to fp32, with norm": 10, "int8 weights to bf16": 3.0625,
    **dict.fromkeys((f"{n} weights to bf16" for n in ("int4", "nf4")), 2.5625),
}  # fmt: skip


def cases() -> dict[str, KernelCase]:
    device = torch.device(DEVICE)
    return {case.name: case for make in MAKERS for case in make(NUMEL, device)}


def test_every_case_has_the_traffic_of_its_formats() -> None:
    measured = {name: case.nbytes / NUMEL for name, case in cases().items()}
    assert measured.keys() == TRAFFIC.keys()
    for name, traffic in TRAFFIC.items():
        assert traffic <= measured[name] <= traffic + 0.1, name


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_kernel_writes_what_is_counted_as_written_and_nothing_else(name: str) -> None:
    case = cases()[name]
    tensors = {id(tensor): tensor for tensor in (*case.read, *case.written)}
    written = {id(tensor) for tensor in case.written}
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    case.run()
    changed = {key for key, tensor in tensors.items() if not torch.equal(tensor, before[key])}
    assert changed == written
