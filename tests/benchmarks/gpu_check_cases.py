"""Machines that are not here, and what would be trained on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import gpu_sizes
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import GIB, TRAININGS, Case, case_of
from offload.planning.machine.speeds import Speeds


def speeds(matmul: float, bus: float, disk: tuple[float, float], link: float) -> Speeds:
    return Speeds(
        name="not here", gpu=True, matmul_flops_per_s={"bf16": matmul}, compute_bytes_per_s=4e12,
        operation_s=5e-6, host_bytes_per_s=bus, nvme_read_bytes_per_s=disk[0],
        nvme_write_bytes_per_s=disk[1], host_to_device_bytes_per_s=link,
        device_to_host_bytes_per_s=0.8 * link,
    )  # fmt: skip


H200 = GpuMachine(
    device_nbytes=138 * GIB, host_nbytes=122 * GIB, disk_nbytes=58 * GIB,
    bus_bytes_per_s=150e9, speeds=speeds(780e12, 150e9, (2e9, 2e9), 50e9),
)  # fmt: skip
MACHINES = {
    "one H200": H200,
    "one H100": dataclasses.replace(H200, device_nbytes=78 * GIB),
    "less RAM": dataclasses.replace(H200, host_nbytes=100 * GIB),
    "a laptop": GpuMachine(
        7 * GIB, 14 * GIB, 20 * GIB, 30e9, speeds(20e12, 30e9, (2e9, 1e9), 12e9)
    ),
}


_SOLVED: dict[str, Any] = {}  # a second each, and the same in most tests


@pytest.fixture(autouse=True)
def solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_sizes._solved

    def solved(*question: Any) -> Any:
        key = repr(question)
        if key not in _SOLVED:
            _SOLVED[key] = real(*question)
        return _SOLVED[key]

    monkeypatch.setattr(gpu_sizes, "_solved", solved)


def planned(machine: GpuMachine, name: str) -> Case:
    case = case_of(TRAININGS[f"step:{name}"], machine)
    assert isinstance(case, Case), case
    return case
