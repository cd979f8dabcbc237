"""What is left of the memory that this process may take, of each limit on its own.

Reads `/proc` and `/sys` below `root`, so that a made-up machine can be given.
"""

from __future__ import annotations

from pathlib import Path

from offload import machine
from offload.machine import read_int
from offload.swap.memory_guard import Headroom, MachineMemory

_ROOT = Path("/")


def read_memory(root: Path = _ROOT) -> MachineMemory:
    """RAM, each limit of this process's cgroups and, where the kernel has them, stalls."""
    total, free = machine.total_memory_nbytes(root), machine.free_memory_nbytes(root)
    swap = machine.free_swap_nbytes(root)
    limits = [Headroom("RAM", total, free, free + swap, reserve_of(total))]
    for limit in machine.memory_limits(root):
        size = limit.limit_nbytes
        room = max(0, size - limit.used_nbytes + limit.active_cache_nbytes)
        last = room + _swap_nbytes(limit.folder, swap) if limit.kills else size
        limits.append(Headroom(f"cgroup {limit.folder}", size, room, last, reserve_of(size)))
    return MachineMemory(tuple(limits), stalls_us(root))


def reserve_of(limit_nbytes: int) -> int:
    """Bytes of a limit that should stay free. What takes memory suddenly (a worker, a batch) is
    larger on a larger machine; of a small container no more than an eighth is left idle."""
    wanted = min(1 << 30, max(64 << 20, limit_nbytes // 50))
    return min(wanted, limit_nbytes // 8)


def stalls_us(root: Path = _ROOT) -> dict[str, int]:
    """Microseconds for which all tasks waited for memory at once (PSI) since the start, of the
    machine and of this process's cgroups, by the file that says so. Empty from a kernel without."""
    files = [root / "proc/pressure/memory"]
    files += [folder / "memory.pressure" for folder in machine.cgroup_folders("memory", root)]
    found = {}
    for file in files:
        for line in (machine.read_setting(str(file)) or "").splitlines():
            total = line.rpartition("total=")[2]
            if line.startswith("full ") and total.isdigit():
                found[str(file)] = int(total)
    return found


def _swap_nbytes(folder: Path, free: int) -> int:
    """Of `free` bytes of swap what this cgroup may still use."""
    used, limit = read_int(folder / "memory.swap.current"), read_int(folder / "memory.swap.max")
    if used is not None and limit is not None:  # v2; no number where there is no limit
        return min(free, max(0, limit - used))
    names = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes",
             "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
    both, both_used, of_memory, memory_used = (read_int(folder / name) for name in names)
    if both is None or both_used is None or of_memory is None or memory_used is None:
        return free
    return min(free, max(0, (both - both_used) - (of_memory - memory_used)))  # v1
