"""Machines that are not here, and what would be trained on them."""

from __future__ import annotations

import dataclasses

from offload.bench.gpu_machine import GpuMachine
from offload.bench.gpu_sizes import GIB, OURS, Case, Needs, choose

H200 = GpuMachine(
    device_nbytes=138 * GIB, host_nbytes=122 * GIB, disk_nbytes=58 * GIB, cores=16,
    matmul_flops_per_s=780e12, touch_bytes_per_s=4e9, bus_bytes_per_s=150e9,
    disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=2e9,
)  # fmt: skip
MACHINES = {
    "one H200": H200,
    "less RAM": dataclasses.replace(H200, host_nbytes=100 * GIB),
    "a desktop": GpuMachine(23 * GIB, 60 * GIB, 500 * GIB, 16, 150e12, 4e9, 60e9, 5e9, 4e9),
    "a laptop": GpuMachine(7 * GIB, 14 * GIB, 20 * GIB, 8, 20e12, 4e9, 30e9, 2e9, 1e9),
}


def chosen(machine: GpuMachine, needs: tuple[Needs, ...] = (OURS,), time_s: float = 240.0) -> Case:
    case, refused = choose(machine, time_s, needs)
    assert case is not None, refused
    return case
