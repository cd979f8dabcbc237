"""The memory, cores and file systems that this process may use.

Container limits count: cgroup v2 and v1 are read at every level from this process up to the root,
because the usual sources (psutil, os.cpu_count) report the whole machine.
All functions read `/proc` and `/sys` below `root`, so that a made-up machine can be given.
"""

import ctypes
import math
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import psutil

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre"})


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: Path
    root: str  # the folder of the file system that is mounted here
    kind: str  # ext4, tmpfs, cgroup2, ...
    options: frozenset[str]

    @property
    def is_memory(self) -> bool:
        """Whether files on it take RAM."""
        return self.kind in _MEMORY_FILE_SYSTEMS

    @property
    def remark(self) -> str:
        """Why swap files should not lie there, and what to do; empty for a local disk."""
        if self.is_memory:
            return "this is RAM: name a folder on a disk in nvme.paths"
        if self.kind in _NETWORK_FILE_SYSTEMS or self.kind == "fuse.sshfs":
            return "a network is slow for this: name a local disk"
        if self.kind.startswith("fuse"):
            return "every request passes through a program (FUSE): name a local disk"
        if self.kind == "overlay":
            return "a container's own layer, whose room is shared: mount a volume and name it"
        return ""


@dataclass(frozen=True)
class MemoryLimit:
    """A cgroup's memory limit and what of it cannot be reclaimed. Page cache in use counts as used;
    the kernel gives up `active_cache_nbytes` of it, which no process has mapped, before it kills.
    """

    folder: Path
    limit_nbytes: int
    used_nbytes: int
    active_cache_nbytes: int = 0
    kills: bool = True  # beyond memory.high processes only wait, soon for most of the time


def rank_here() -> int:
    """Return this process's number among those that train together; 0 for one alone."""
    world = sys.modules.get("torch.distributed")  # it is not there before a program imports it
    if world is not None and world.is_available() and world.is_initialized():
        return int(world.get_rank())
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes train together; 1 before they have found each other."""
    world = sys.modules.get("torch.distributed")
    joined = world is not None and world.is_available() and world.is_initialized()
    return int(world.get_world_size()) if world is not None and joined else 1


def total_memory_nbytes(root: Path = _ROOT) -> int:
    """Return the RAM of the whole machine, in bytes."""
    return _meminfo("MemTotal", root) or int(psutil.virtual_memory().total)


def memory_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """Return every cgroup memory limit that binds this process, innermost first."""
    limits = []
    for folder in _cgroup_folders("memory", root):
        for name in ("memory.high", "memory.max", "memory.limit_in_bytes"):
            limit = _read_int(folder / name)
            if limit is not None and limit < _UNLIMITED:
                used = _used_nbytes(folder)
                limits.append(MemoryLimit(folder, limit, *used, kills=name != "memory.high"))
    return limits


def memory_limit_nbytes(root: Path = _ROOT) -> int:
    """Return the most bytes this process may ever hold: the RAM, or the tightest cgroup limit."""
    return min([total_memory_nbytes(root), *(limit.limit_nbytes for limit in memory_limits(root))])


def available_memory_nbytes(root: Path = _ROOT) -> int:
    """Return the bytes this process can still take without swapping or being killed."""
    rooms = [max(0, limit.limit_nbytes - limit.used_nbytes) for limit in memory_limits(root)]
    return min([free_memory_nbytes(root), *rooms])


def free_memory_nbytes(root: Path = _ROOT) -> int:
    """Return the RAM of the whole machine that can be taken without swapping."""
    available = _meminfo("MemAvailable", root)
    return int(psutil.virtual_memory().available) if available is None else available


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the cores' worth of time the tightest cgroup grants; None without a quota."""
    shares = [share for folder in _cgroup_folders("cpu", root) if (share := _quota_of(folder))]
    return min(shares, default=None)


def cpu_count(root: Path = _ROOT) -> int:
    """Return how many cores this process may use at once: affinity and cgroup quota, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_features() -> frozenset[str]:
    """Return the instruction set flags of the first core, for example avx2; empty if unknown."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cpu_model() -> str:
    """Return the processor's name, or `unknown`."""
    return _cpuinfo("model name") or "unknown"


def _cpuinfo(*names: str) -> str:
    """Return the first core's value of one of these names in /proc/cpuinfo; empty if unknown."""
    for line in (_read(_ROOT / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def slow_matmul_precisions() -> list[str]:
    """16-bit formats whose matrix products PyTorch has no fast CPU kernel for on this CPU."""
    import torch

    fast = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    return [name for name, asks in fast.items() if not getattr(torch.ops.mkldnn, asks)()]


def trim_memory() -> bool:
    """Give freed heap memory back to the system; False where the C library cannot (no glibc).

    Large temporaries of changing sizes otherwise leave the heap as long as it once was.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


def rss_nbytes() -> int:
    """Return the bytes of RAM this process holds now."""
    with open("/proc/self/statm", "rb") as file:  # psutil takes three times as long
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_rss_nbytes() -> int:
    """Return the most RAM this process has ever held, in bytes."""
    for line in (_read(_ROOT / "proc/self/status") or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mount_of(path: Path, root: Path = _ROOT) -> Mount | None:
    """Return the mount that holds `path` (which need not exist); None if mounts cannot be read."""
    real = path.resolve()
    holding = [mount for mount in mounts(root) if real.is_relative_to(mount.point)]
    # the last of equally deep mounts hides the earlier ones
    return max(reversed(holding), key=lambda mount: len(mount.point.parts), default=None)


def swap_folder(root: Path = _ROOT) -> Path:
    """Return the folder for swap files if none is named: the temporary folder, or /var/tmp if the
    temporary folder is RAM and TMPDIR does not ask for it."""
    temporary, on_disk = Path(tempfile.gettempdir()), Path("/var/tmp")
    if "TMPDIR" in os.environ or not _is_memory(temporary, root):
        return temporary
    usable = os.access(on_disk, os.W_OK | os.X_OK) and not _is_memory(on_disk, root)
    return on_disk if usable else temporary


def _is_memory(path: Path, root: Path) -> bool:
    mount = mount_of(path, root)
    return mount is not None and mount.is_memory


def mounts(root: Path = _ROOT) -> list[Mount]:
    """Return everything mounted in this process's view, in mount order."""
    return list(_mounts_in(_read(root / "proc/self/mountinfo") or ""))


@lru_cache(maxsize=1)
def _mounts_in(text: str) -> tuple[Mount, ...]:
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if separator and len(fields) >= 6 and kinds:
            options = {*fields[5].split(","), *(kinds[2].split(",") if len(kinds) > 2 else [])}
            point = Path(fields[4].encode().decode("unicode_escape"))
            mounts.append(Mount(point, fields[3], kinds[0], frozenset(options)))
    return tuple(mounts)


def _cgroup_folders(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """Yield the folders of this process's cgroups for `controller`, innermost first, v2 then v1."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        kind = "cgroup" if controllers else "cgroup2"
        if controllers and controller not in controllers.split(","):
            continue
        for mount in mounts(root):
            if mount.kind == kind and (kind == "cgroup2" or controller in mount.options):
                yield from _upwards(root / str(mount.point).lstrip("/"), mount.root, path)


def _upwards(point: Path, mounted: str, path: str) -> Iterator[Path]:
    # inside a container the mount shows only the part of the hierarchy below `mounted`
    inner = path.removeprefix(mounted) if mounted != "/" else path
    parts = [part for part in inner.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = point.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _used_nbytes(folder: Path) -> tuple[int, int]:
    """Return the bytes in use, and how many of them are page cache."""
    used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes") or 0
    stats = dict(line.split()[:2] for line in (_read(folder / "memory.stat") or "").splitlines())
    # inactive page cache is given back on demand
    inactive, active, mapped = (
        int(stats.get(f"total_{v1}", stats.get(v2, 0)))
        for v1, v2 in (("inactive_file",) * 2, ("active_file",) * 2, ("mapped_file", "file_mapped"))
    )
    return max(0, used - inactive), max(0, active - mapped)


def _quota_of(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _meminfo(name: str, root: Path) -> int | None:
    """Return the bytes that a line of /proc/meminfo gives."""
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == f"{name}:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _read_int(path: Path) -> int | None:
    """Return the number in a file of /proc or /sys; None if there is none."""
    text = _read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
