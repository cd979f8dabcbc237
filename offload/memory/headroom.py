"""The memory that this process may still take, by each limit on its own.

Reads `/proc` and `/sys` below `root`, so that a made-up machine can be given.
"""

from __future__ import annotations

from pathlib import Path

from offload.process import machine
from offload.process.machine import read_int
from offload.swap.threads.memory_guard import Headroom

_ROOT = Path("/")


class MemoryReader:
    """Reads RAM and each limit of this process's cgroups, in some 0.2 ms: which cgroups these are
    is looked up only where that has changed."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._cgroups: str | None = None
        self._folders: list[Path] = []

    def __call__(self) -> list[Headroom]:
        root, cgroups = self._root, machine.read_setting("/proc/self/cgroup", self._root)
        if cgroups != self._cgroups:
            self._cgroups, self._folders = cgroups, list(machine.cgroup_folders("memory", root))
        total, free = machine.total_memory_nbytes(root), machine.free_memory_nbytes(root)
        swap = machine.free_swap_nbytes(root)
        limits = [Headroom("RAM", total, free, free + swap, reserve_of(total))]
        return limits + [_headroom(limit, swap) for limit in machine.limits_of(self._folders)]


def _headroom(limit: machine.MemoryLimit, swap_nbytes: int) -> Headroom:
    size = limit.limit_nbytes
    room = max(0, size - limit.used_nbytes + limit.active_cache_nbytes)
    last = room + _swap_nbytes(limit.folder, swap_nbytes) if limit.kills else size
    return Headroom(f"cgroup {limit.folder}", size, room, last, reserve_of(size))


def reserve_of(limit_nbytes: int) -> int:
    """Return the bytes of a limit that should stay free. Sudden allocations (a worker, a batch) are
    larger on a larger machine; in a small container at most an eighth stays idle."""
    wanted = min(1 << 30, max(64 << 20, limit_nbytes // 50))
    return min(wanted, limit_nbytes // 8)


def _swap_nbytes(folder: Path, free: int) -> int:
    """Return how much of `free` bytes of swap this cgroup may still use."""
    used, limit = read_int(folder / "memory.swap.current"), read_int(folder / "memory.swap.max")
    if used is not None and limit is not None:  # v2; no number where there is no limit
        return min(free, max(0, limit - used))
    names = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes",
             "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
    both, both_used, of_memory, memory_used = (read_int(folder / name) for name in names)
    if both is None or both_used is None or of_memory is None or memory_used is None:
        return free
    return min(free, max(0, (both - both_used) - (of_memory - memory_used)))  # v1
