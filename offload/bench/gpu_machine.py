"""What a machine with a GPU has: sizes, and the speeds that sizes are chosen by."""

from __future__ import annotations

import mmap
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload import machine
from offload.bench.record import this_machine
from offload.bench.step_limits import BusLimit
from offload.swap.measure import measure_bandwidth
from offload.tiers.memory import HostMemory

_DISK_NBYTES = 256 << 20
_TOUCH_NBYTES = 8 << 30
_TOUCH_PIECE_NBYTES = 64 << 20
_TOUCH_S = 2.0
_BUS_NUMEL = 1 << 26  # 1.2 GB of states: beyond any cache
_PRODUCT = 8192


@dataclass(frozen=True)
class GpuMachine:
    """Bytes that may still be taken, and speeds in bytes or operations per second."""

    device_nbytes: int
    host_nbytes: int
    disk_nbytes: int
    cores: int
    matmul_flops_per_s: float  # bf16, of one large product
    touch_bytes_per_s: float  # memory that nobody had before: a virtual machine may have to get it
    bus_bytes_per_s: float  # of the optimizer's traffic on all cores, without arithmetic
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe(folder: Path, memory_nbytes: int | None, rounds: int = 7) -> dict[str, Any]:
    """Measure this machine: `machine` for `GpuMachine`, `hardware` to be named in the record.

    `memory_nbytes` stands in for what the system says is available. Blocks for about 15 seconds.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    touched = _touch_speed()  # first: what others have touched and left is quick to get
    disk = measure_bandwidth(folder, _DISK_NBYTES)
    found = GpuMachine(
        device_nbytes=torch.cuda.mem_get_info(device)[0],
        host_nbytes=memory_nbytes or machine.available_memory_nbytes(),
        disk_nbytes=_free_nbytes(folder),
        cores=machine.cpu_count(),
        matmul_flops_per_s=matmul_speed(device, rounds),
        touch_bytes_per_s=touched,
        bus_bytes_per_s=_bus_speed(rounds),
        disk_read_bytes_per_s=disk.read_bytes_per_s,
        disk_write_bytes_per_s=disk.write_bytes_per_s,
    )
    return {"machine": found.to_dict(), "hardware": describe(device)}


def describe(device: torch.device) -> dict[str, Any]:
    """Names and versions, besides what every bench says of the machine."""
    properties = torch.cuda.get_device_properties(device)
    described = this_machine() | {
        "gpu": properties.name,
        "gpu_memory_nbytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }
    try:
        import triton
    except ImportError:
        return described
    return described | {"triton": triton.__version__}


def _free_nbytes(folder: Path) -> int:
    import psutil

    return int(psutil.disk_usage(str(folder)).free)


def _touch_speed() -> float:
    """Bytes per second of the first write to fresh memory, in huge pages where they are to be had.

    Pinning and loading have to do that to every byte of the host tier.
    """
    room = min(_TOUCH_NBYTES, machine.available_memory_nbytes() // 4)
    size = max(mmap.PAGESIZE, room // _TOUCH_PIECE_NBYTES * _TOUCH_PIECE_NBYTES)
    memory = HostMemory(size)
    array = memory.tensor(0, size).numpy()
    started, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - started < _TOUCH_S:
        array[done : done + _TOUCH_PIECE_NBYTES] = 1
        done += _TOUCH_PIECE_NBYTES
    speed = min(done, size) / (time.perf_counter() - started)
    del array
    memory.close()
    return speed


def _bus_speed(rounds: int) -> float:
    loop = BusLimit("bf16", _BUS_NUMEL, machine.cpu_count())
    try:
        loop.measure()
        return float(np.median([loop.measure() for _ in range(rounds)]))
    finally:
        loop.close()


def matmul_speed(device: torch.device, rounds: int) -> float:
    """Operations per second of a bf16 product of two random square matrices: the median.

    Random ones: zeros cost less power, so clocks stay higher than any training sees.
    """
    size = _PRODUCT
    while 3 * size * size * 2 * 4 > torch.cuda.mem_get_info(device)[0] and size > 1024:
        size //= 2
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = device_seconds(lambda: torch.mm(a, b, out=out), rounds=rounds, repeats=10)
    return float(2 * size**3 / np.median(seconds))


def device_seconds(work: Callable[[], object], *, rounds: int, repeats: int) -> list[float]:
    """Time on the device of one call of `work`, per round of `repeats` calls, after a warm-up."""
    work()
    torch.cuda.synchronize()
    return [timed_on_device(work, repeats) for _ in range(rounds)]


def timed_on_device(work: Callable[[], object], repeats: int) -> float:
    """Seconds per call, between two events in the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats
