"""What a machine with a GPU has: sizes, and the speeds that sizes are chosen by."""

from __future__ import annotations

import mmap
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload import machine
from offload.bench.child import Parent
from offload.bench.limits import BusLimit
from offload.bench.record import this_machine
from offload.planning.speeds import Speeds
from offload.swap.measure import measure_bandwidth
from offload.swap.swap_file import free_space
from offload.tiers.memory import HostMemory

_DISK_NBYTES = 256 << 20
_TOUCH_NBYTES = 8 << 30
_TOUCH_PIECE_NBYTES = 64 << 20
_TOUCH_S = 2.0
_BUS_NUMEL = 1 << 26  # 1.2 GB of states: beyond any cache
_PRODUCT = 8192
_COPY_NBYTES = 256 << 20
_COMPUTE_SHARE = 0.3
_ROUNDS = 7


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
    device_bytes_per_s: float  # of the device's own memory, both directions together
    to_device_bytes_per_s: float  # raw copies of pinned memory
    to_host_bytes_per_s: float

    def speeds(self) -> Speeds:
        """As the planner takes them. Products at a share of their rate, guessed low: an estimate of
        time, not a claim."""
        return Speeds(
            "this machine", gpu=True,
            matmul_flops_per_s={"bf16": _COMPUTE_SHARE * self.matmul_flops_per_s},
            compute_bytes_per_s=self.device_bytes_per_s, operation_s=0.0,
            host_bytes_per_s=self.bus_bytes_per_s,
            nvme_read_bytes_per_s=self.disk_read_bytes_per_s,
            nvme_write_bytes_per_s=self.disk_write_bytes_per_s,
            host_to_device_bytes_per_s=self.to_device_bytes_per_s,
            device_to_host_bytes_per_s=self.to_host_bytes_per_s,
        )  # fmt: skip


def probe(options: Mapping[str, Any], parent: Parent) -> None:
    """A child's program: `machine` for `GpuMachine`, `hardware` to be named in the record.

    `memory_nbytes` stands in for what the system says is available. Takes about 15 seconds.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    folder = Path(options["folder"])
    touched = _touch_speed()  # first: what others have touched and left is quick to get
    disk = measure_bandwidth(folder, _DISK_NBYTES)
    pinned = torch.zeros(_COPY_NBYTES, dtype=torch.uint8).pin_memory()
    there, elsewhere = (torch.empty_like(pinned, device=device) for _ in range(2))
    found = GpuMachine(
        device_nbytes=torch.cuda.mem_get_info(device)[0],
        host_nbytes=options["memory_nbytes"] or machine.available_memory_nbytes(),
        disk_nbytes=free_space(folder),
        cores=machine.cpu_count(),
        matmul_flops_per_s=matmul_speed(device),
        touch_bytes_per_s=touched,
        bus_bytes_per_s=_bus_speed(),
        disk_read_bytes_per_s=disk.read_bytes_per_s,
        disk_write_bytes_per_s=disk.write_bytes_per_s,
        device_bytes_per_s=2 * _copy_speed(there, elsewhere),
        to_device_bytes_per_s=_copy_speed(there, pinned),
        to_host_bytes_per_s=_copy_speed(pinned, there),
    )
    parent.answer({"machine": asdict(found), "hardware": describe(device)})


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


def _bus_speed() -> float:
    loop = BusLimit("bf16", _BUS_NUMEL, machine.cpu_count())
    try:
        loop.measure()
        return statistics.median(loop.measure() for _ in range(_ROUNDS))
    finally:
        loop.close()


def _copy_speed(target: torch.Tensor, source: torch.Tensor) -> float:
    return source.nbytes / device_seconds(lambda: target.copy_(source, non_blocking=True))


def matmul_speed(device: torch.device) -> float:
    """Operations per second of a bf16 product of two random square matrices: the median.

    Random ones: zeros cost less power, so clocks stay higher than any training sees.
    """
    size = _PRODUCT
    while 3 * size * size * 2 * 4 > torch.cuda.mem_get_info(device)[0] and size > 1024:
        size //= 2
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / device_seconds(lambda: torch.mm(a, b, out=out))


def device_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Time on the device of one call of `work`: the median of rounds, after a warm-up."""
    work()
    torch.cuda.synchronize()
    return statistics.median(timed_on_device(work, repeats) for _ in range(_ROUNDS))


def timed_on_device(work: Callable[[], object], repeats: int) -> float:
    """Seconds per call, between two events in the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats
