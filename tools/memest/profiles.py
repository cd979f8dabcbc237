"""Hardware that need not be here: named parts, given sizes, or this machine, as a plan sees it.

A profile describes one node and how many there are; `hardware` and `speeds` are one rank's even
share (one rank per GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload import machine
from offload.planning.machine.network import Network
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.plan import Hardware
from offload.planning.plan.tuning import rated_bandwidth
from offload.tiers.errors import ConfigError
from offload.tiers.units import format_bytes
from offload.tools.memest.local_gpus import LocalGpu, local_gpus
from offload.tools.memest.part_names import (
    find_part,
    plain_name,
    read_count,
    read_size,
    unknown_part,
)
from offload.tools.memest.parts import (
    GEN4,
    GPUS,
    MACHINES,
    NCCL,
    SSDS,
    TB,
    GpuPart,
    LinkPart,
    MachinePart,
    SsdPart,
)
from offload.zero.sharding import ALONE, Sharding

# What of a rated peak a training step reaches in the long run.
MATMUL_SHARE = 0.5  # PaLM (2204.02311) counts 46 % of the peak, Megatron-LM (2104.04473) 44-52 %
MEMORY_SHARE = 0.8  # GPU and host: STREAM copies reach 75-90 % of what the modules are rated at
LINK_SHARE = 0.8  # pinned copies of megabytes: 12.3 of 15.75, 25 of 31.5 GB/s
NETWORK_SHARE = 0.8  # of links between ranks: assumed to be as good as that of copies
SSD_SHARE = 0.9  # large requests, several in flight, through a file system
OPERATION_S = 6e-6  # PyTorch's eager dispatch takes 4-10 us per operation
FILE_SYSTEM_SHARE = 0.95  # ext4 keeps 5 % for the administrator
SYSTEM_NBYTES = 2 << 30  # of RAM, for the rest of an idle system

_LEAST_MEMORY, _MOST_MEMORY = 256 << 20, 1 << 50
_LEAST_DISK, _MOST_DISK = 1 << 30, 1 << 60


@dataclass(frozen=True)
class HardwareProfile:
    """One node, and how many there are. Bytes and bytes per second; rates are peaks."""

    name: str
    gpu: GpuPart | None  # its rates are those of `rates_of`; None: the model computes on the CPU
    gpu_nbytes: int
    gpu_free_nbytes: int
    gpus: int  # per node
    nodes: int
    ram_nbytes: int
    ram_free_nbytes: int
    cores: int
    ram_bytes_per_s: float  # 0: unknown
    link: LinkPart | None
    uplinks: int  # links that reach the host; all GPUs share them
    nvme_nbytes: int  # free
    ssds: tuple[SsdPart, ...]  # empty: rates and endurance unknown
    network_bytes_per_s: float = 0.0  # of one node; 0: unknown
    inside: LinkPart | None = None  # of one GPU to those beside it; None: as to the host
    here: bool = False  # it computes where we are: speeds can be measured
    whole: bool = False  # a machine by name: no option gives it other GPUs
    reserve_nbytes: int | None = None  # of RAM, kept for the system; None: the default
    own_ram: bool = False  # the RAM is this machine's, as this process sees it
    notes: tuple[str, ...] = ()  # what was assumed

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes

    @property
    def usable_ram_nbytes(self) -> int:
        """What a run may ever hold of a node: of RAM that is described, without the system's."""
        return self.ram_nbytes if self.own_ram else self.ram_free_nbytes

    @property
    def system_nbytes(self) -> int:
        """RAM of a node that is kept for the system."""
        return self.ram_nbytes - self.usable_ram_nbytes

    @property
    def reserve_note(self) -> str:
        """What of the RAM is left to the system, as a sentence; empty where nothing is."""
        kept = self.system_nbytes
        if not kept:
            return ""
        return (
            f"of the {format_bytes(self.ram_nbytes)} of RAM, {format_bytes(kept)} are left to the "
            f"system: {format_bytes(self.usable_ram_nbytes)} can be filled; --reserve 0 where a "
            "container has them all"
        )

    def hardware(self, sharding: Sharding = ALONE) -> Hardware:
        """What one rank's plan may use: its GPU, and an even share of the node's RAM and disk."""
        ranks = self.ranks_per_node
        read, write = self._ssd_rates()
        return Hardware(
            device_nbytes=self.gpu_free_nbytes,
            host_nbytes=self.usable_ram_nbytes // ranks,
            host_free_nbytes=self.ram_free_nbytes // ranks,
            nvme_free_nbytes=self.nvme_nbytes // ranks,
            measure_nvme=rated_bandwidth(read, write) if self.ssds else None,
            kernels_missing=None if self.gpu_nbytes else "the model computes on the CPU",
            sharding=sharding,
        )

    def speeds(self, measured: Speeds | None = None) -> Speeds | None:
        """One rank's sustained rates; None where a GPU's, the RAM's or the link's are unknown.

        `measured`: those of this machine, which hold where it computes; drives may be others.
        """
        if self.here:
            return self._with_drives(measured) if measured is not None else None
        gpu, link = self.gpu, self.link
        if gpu is None or link is None or not self.ram_bytes_per_s:
            return None
        ranks = self.ranks_per_node
        read, write = self._ssd_rates()
        crossing = link.bytes_per_s * LINK_SHARE * min(1.0, self.uplinks / ranks)
        return Speeds(
            name=self.name,
            gpu=True,
            matmul_flops_per_s={p: rate * MATMUL_SHARE for p, rate in gpu.flops_per_s.items()},
            compute_bytes_per_s=gpu.bytes_per_s * MEMORY_SHARE,
            operation_s=OPERATION_S,
            host_bytes_per_s=self.ram_bytes_per_s * MEMORY_SHARE / ranks,
            nvme_read_bytes_per_s=read,
            nvme_write_bytes_per_s=write,
            host_to_device_bytes_per_s=crossing,
            device_to_host_bytes_per_s=crossing,
            endurance_nbytes=sum(ssd.endurance_nbytes for ssd in self.ssds) // ranks,
            network=self.network(),
        )

    def network(self) -> Network | None:
        """Between all ranks; None where nothing is known of how GPUs are connected."""
        inside = self.inside or self.link
        if inside is None:
            return None
        # without links of their own they share the ways to the host
        share = 1.0 if self.inside is not None else min(1.0, self.uplinks / self.ranks_per_node)
        return Network(
            ranks_per_machine=self.ranks_per_node,
            inside_bytes_per_s=inside.bytes_per_s * NETWORK_SHARE * share,
            between_bytes_per_s=self.network_bytes_per_s * NETWORK_SHARE,
            begin_s=NCCL.begin_s,
            inside_step_s=NCCL.inside_step_s,
            between_step_s=NCCL.between_step_s,
            message_s=NCCL.message_s,
        )

    def _with_drives(self, measured: Speeds) -> Speeds:
        if not self.ssds:
            return measured
        read, write = self._ssd_rates()
        return replace(
            measured, name=self.name, nvme_read_bytes_per_s=read, nvme_write_bytes_per_s=write,
            endurance_nbytes=sum(ssd.endurance_nbytes for ssd in self.ssds) // self.ranks_per_node,
        )  # fmt: skip

    def _ssd_rates(self) -> tuple[float, float]:
        """Sustained read and write of one rank's share of all drives."""
        share = SSD_SHARE / self.ranks_per_node
        return (
            sum(ssd.read_bytes_per_s for ssd in self.ssds) * share,
            sum(ssd.write_bytes_per_s for ssd in self.ssds) * share,
        )


def read_profile(
    gpu: str | None = None, ram: str | None = None, nvme: str | None = None,
    gpus: int | None = None, nodes: int | None = None, *, nvme_paths: Sequence[Path] = (),
    reserve: str | None = None,
) -> HardwareProfile:  # fmt: skip
    """The hardware that options describe; what they leave open is as on this machine.

    `gpu`: a size (`24GiB`), a part (`RTX 4090`), a whole machine (`DGX-2`) or `none`;
    `ram`: a size, of which `reserve` (a size, 0 in a container) is kept for the system;
    `nvme`: a size, a drive (`Gen4 SSD`) or several (`4 x Gen4 SSD`).
    ConfigError, naming the option, for anything else.
    """
    profile = _around(gpu, nvme_paths)
    if ram is not None:
        profile = with_ram(profile, read_size(ram, "--ram", _LEAST_MEMORY, _MOST_MEMORY))
    if reserve is not None:
        profile = _with_reserve(profile, read_size(reserve, "--reserve", 0, _MOST_MEMORY))
    if nvme is not None:
        profile = _with_nvme(profile, nvme)
    elif not profile.here and profile.nvme_nbytes and not profile.ssds:
        profile = _with_assumed_drive(profile, profile.nvme_nbytes)
    count = read_count(gpus, "--gpus", 0 if profile.gpu_nbytes == 0 else 1)
    if count is not None:
        profile = with_gpus(profile, count)
    several = read_count(nodes, "--nodes", 1)
    profile = replace(profile, nodes=several or profile.nodes)
    if [ram, nvme, gpus] == [None] * 3 and (gpu is None or find_part(gpu, MACHINES) is not None):
        name = profile.name
        return replace(profile, name=f"{profile.nodes} x {name}" if profile.nodes > 1 else name)
    return replace(profile, name=_title(profile))


def this_machine(nvme_paths: Sequence[Path] = ()) -> HardwareProfile:
    """What this process may use of the machine it runs on; `nvme_paths`: folders for swap files."""
    gpus = local_gpus()
    first = min(gpus, key=lambda each: each.free_nbytes, default=None)
    part = _known_gpu(first)
    return HardwareProfile(
        name="this machine",
        gpu=part,
        gpu_nbytes=first.nbytes if first else 0,
        gpu_free_nbytes=first.free_nbytes if first else 0,
        gpus=len(gpus),
        nodes=1,
        ram_nbytes=machine.memory_limit_nbytes(),
        ram_free_nbytes=machine.available_memory_nbytes(),
        cores=machine.cpu_count(),
        ram_bytes_per_s=0.0,
        link=part.link if part else None,
        uplinks=max(1, len(gpus)),
        nvme_nbytes=_free_disk(nvme_paths),
        ssds=(),
        here=True,
        own_ram=True,
    )


def _free_disk(paths: Sequence[Path]) -> int:
    """Free under all folders (a temporary one where there are none), once per file system."""
    import os
    import tempfile

    free: dict[int, int] = {}
    for path in paths or [Path(tempfile.gettempdir())]:
        there = next((each for each in [path, *path.resolve().parents] if each.exists()), None)
        if there is not None:
            status = os.statvfs(there)
            free[there.stat().st_dev] = status.f_bavail * status.f_frsize
    return sum(free.values())


def _known_gpu(found: LocalGpu | None) -> GpuPart | None:
    """The named part that a GPU of this machine is, by its name and memory."""
    if found is None:
        return None
    name = plain_name(found.name)
    fitting = [gpu for gpu in GPUS if plain_name(gpu.name.partition("-")[0]) in name]
    return min(fitting, key=lambda gpu: abs(gpu.nbytes - found.nbytes), default=None)


def _around(gpu: str | None, nvme_paths: Sequence[Path]) -> HardwareProfile:
    """The profile of a GPU or machine, with this machine's RAM and disk where it has none."""
    here = this_machine(nvme_paths)
    if gpu is None:
        return here
    whole = find_part(gpu, MACHINES)
    if whole is not None:
        return _of_machine(whole)
    note = "RAM and disk, where not given, are this machine's"
    if plain_name(gpu) in ("none", "cpu", "0"):
        return replace(
            here, gpu=None, gpu_nbytes=0, gpu_free_nbytes=0, gpus=0, link=None,
            here=here.gpu_nbytes == 0, notes=() if here.gpu_nbytes == 0 else (note,),
        )  # fmt: skip
    part = find_part(gpu, GPUS)
    notes = [note]
    if part is None:
        part, assumed = _of_size(gpu)
        notes.append(assumed)
    notes.append(f"RAM as fast as in a {part.host.name} ({part.host.bytes_per_s / 1e9:.0f} GB/s)")
    return replace(
        here, gpu=part, gpu_nbytes=part.nbytes, gpu_free_nbytes=part.nbytes, gpus=1, uplinks=1,
        link=part.link, ram_bytes_per_s=part.host.bytes_per_s, here=False, notes=tuple(notes),
    )  # fmt: skip


def _of_machine(part: MachinePart) -> HardwareProfile:
    ssds = (part.ssd,) * part.ssds if part.ssd is not None else ()
    return HardwareProfile(
        name=part.name,
        gpu=part.gpu,
        gpu_nbytes=part.gpu.nbytes,
        gpu_free_nbytes=part.gpu.nbytes,
        gpus=part.gpus,
        nodes=1,
        ram_nbytes=part.ram_nbytes,
        ram_free_nbytes=part.ram_nbytes - SYSTEM_NBYTES,
        cores=part.cores,
        ram_bytes_per_s=part.ram_bytes_per_s,
        link=part.gpu.link,
        uplinks=part.uplinks,
        nvme_nbytes=int(sum(ssd.nbytes for ssd in ssds) * FILE_SYSTEM_SHARE),
        ssds=ssds,
        network_bytes_per_s=part.network_bytes_per_s,
        inside=part.inside,
        whole=True,
        notes=(part.source,),
    )


def _of_size(text: str) -> tuple[GpuPart, str]:
    """A GPU of which only the memory is known, with the rates of the named one nearest in size."""
    if not text.strip()[:1].isdigit():
        raise ConfigError(f"--gpu {text}: {unknown_part(text, [*GPUS, *MACHINES])}")
    nbytes = read_size(text, "--gpu", _LEAST_MEMORY, _MOST_MEMORY)
    near = min(GPUS, key=lambda gpu: (abs(gpu.nbytes - nbytes), gpu.flops_per_s["bf16"]))
    name = f"{format_bytes(nbytes)} GPU"
    note = f"a GPU's speed does not follow from its memory: assumed to be that of an {near.name}"
    return replace(near, name=name, nbytes=nbytes, source=f"assumed as {near.name}"), note


def with_ram(profile: HardwareProfile, nbytes: int) -> HardwareProfile:
    """With `nbytes` of RAM in a node; of it `profile.reserve_nbytes` are kept for the system, or by
    default what an idle one takes."""
    free = max(nbytes // 2, nbytes - SYSTEM_NBYTES)
    if profile.reserve_nbytes is not None:
        free = max(0, nbytes - profile.reserve_nbytes)
    return replace(profile, ram_nbytes=nbytes, ram_free_nbytes=free, own_ram=False)


def _with_reserve(profile: HardwareProfile, nbytes: int) -> HardwareProfile:
    """With `nbytes` of a node's RAM kept for the system. ConfigError where the RAM is this
    machine's, or nothing would be left."""
    if profile.own_ram:
        raise ConfigError(
            "--reserve: of this machine what is free now is known; it goes with --ram or a machine "
            "by name"
        )
    if nbytes > profile.ram_nbytes - _LEAST_MEMORY:
        raise ConfigError(
            f"--reserve {format_bytes(nbytes)}: leaves less than {format_bytes(_LEAST_MEMORY)} of "
            f"the {format_bytes(profile.ram_nbytes)} of RAM; write less, 0 in a container"
        )
    return with_ram(replace(profile, reserve_nbytes=nbytes), profile.ram_nbytes)


def _with_nvme(profile: HardwareProfile, text: str) -> HardwareProfile:
    count, _, rest = text.partition("x")
    several = int(count) if rest and count.strip().isdecimal() else 1
    name = rest if rest and count.strip().isdecimal() else text
    part = find_part(name, SSDS)
    if part is not None:
        if not 1 <= several <= 1024:
            raise ConfigError(f"--nvme {text}: {several} drives; write 1 to 1024")
        free = int(part.nbytes * several * FILE_SYSTEM_SHARE)
        return replace(profile, nvme_nbytes=free, ssds=(part,) * several)
    if not name.strip()[:1].isdigit():
        raise ConfigError(f"--nvme {text}: {unknown_part(name, SSDS)}")
    nbytes = 0
    if name.strip() != "0":
        nbytes = read_size(name, "--nvme", _LEAST_DISK, _MOST_DISK) * several
    if not nbytes:
        return replace(profile, nvme_nbytes=0, ssds=())
    return _with_assumed_drive(profile, nbytes)


def _with_assumed_drive(profile: HardwareProfile, nbytes: int) -> HardwareProfile:
    """A disk of which only the size is known: as fast, and for its size as durable, as a usual one.

    This machine's speeds do not say: they hold where it computes, and were not asked for.
    """
    drive = replace(
        GEN4, nbytes=nbytes, endurance_nbytes=int(GEN4.endurance_nbytes * nbytes / GEN4.nbytes)
    )
    note = (
        f"a drive's speed does not follow from its size: assumed to be that of a {GEN4.name} with "
        f"{GEN4.endurance_nbytes // (GEN4.nbytes // TB) // TB} TB written per TB"
    )
    return replace(profile, nvme_nbytes=nbytes, ssds=(drive,), notes=(*profile.notes, note))


def with_gpus(profile: HardwareProfile, gpus: int) -> HardwareProfile:
    """With `gpus` of the same kind in a node. ConfigError where there is none."""
    if not profile.gpu_nbytes:
        if gpus:
            raise ConfigError("--gpus: this machine has no GPU to count; name one with --gpu")
        return profile
    uplinks = max(1, round(profile.uplinks * gpus / max(1, profile.gpus)))
    return replace(profile, gpus=gpus, uplinks=uplinks)


def _title(profile: HardwareProfile) -> str:
    """`4 x RTX 4090, 64.0 GiB RAM, 1.0 TiB nvme, 2 nodes`."""
    name = profile.gpu.name if profile.gpu else "GPU of this machine"
    parts = [f"{profile.gpus} x {name}" if profile.gpus > 1 else name]
    if not profile.gpu_nbytes:
        parts = ["CPU only"]
    parts.append(f"{format_bytes(profile.ram_nbytes)} RAM")
    if profile.nvme_nbytes:
        parts.append(f"{format_bytes(profile.nvme_nbytes)} nvme")
    if profile.nodes > 1:
        parts.append(f"{profile.nodes} nodes")
    return ", ".join(parts)
