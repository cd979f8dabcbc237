"""Machines that are not here, and what would be trained on them."""

from __future__ import annotations

import dataclasses

from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import GIB, Case, Peer, choose

H200 = GpuMachine(
    device_nbytes=138 * GIB, host_nbytes=122 * GIB, disk_nbytes=58 * GIB, cores=16,
    matmul_flops_per_s=780e12, touch_bytes_per_s=4e9, bus_bytes_per_s=150e9,
    disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=2e9, device_bytes_per_s=4e12,
    to_device_bytes_per_s=50e9, to_host_bytes_per_s=40e9,
)  # fmt: skip
MACHINES = {
    "one H200": H200,
    "less RAM": dataclasses.replace(H200, host_nbytes=100 * GIB),
    "a desktop": GpuMachine(
        23 * GIB, 60 * GIB, 500 * GIB, 16, 150e12, 4e9, 60e9, 5e9, 4e9, 9e11, 25e9, 25e9
    ),
    "a laptop": GpuMachine(
        7 * GIB, 14 * GIB, 20 * GIB, 8, 20e12, 4e9, 30e9, 2e9, 1e9, 2e11, 12e9, 12e9
    ),
}  # fmt: skip


def chosen(machine: GpuMachine, peers: tuple[Peer, ...] = (), time_s: float = 240.0) -> Case:
    case, refused = choose(machine, time_s, peers)
    assert case is not None, refused
    return case
