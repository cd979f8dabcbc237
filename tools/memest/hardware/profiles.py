"""Hardware as a plan sees it: named parts, given sizes, or this machine.

A profile describes one node and how many there are; `hardware` and `speeds` are one rank's even
share (one rank per GPU).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.planning.machine.speeds import Speeds
from offload.planning.plan.plan import Hardware
from offload.process import machine
from offload.tiers.units import format_bytes
from offload.tools.memest.hardware.parts import GpuPart, SsdPart
from offload.zero.ranks.sharding import ALONE, Sharding

# The share of a rated peak that a training step reaches in the long run.
MATMUL_SHARE = 0.5  # PaLM (2204.02311) counts 46 % of the peak, Megatron-LM (2104.04473) 44-52 %
MEMORY_SHARE = 0.8  # GPU and host: STREAM copies reach 75-90 % of the modules' ratings
LINK_SHARE = 0.8  # pinned copies of megabytes: 12.3 of 15.75, 25 of 31.5 GB/s
SSD_SHARE = 0.9  # large requests, several in flight, through a file system
OPERATION_S = 6e-6  # PyTorch's eager dispatch takes 4-10 us per operation
SYSTEM_NBYTES = 2 << 30  # of RAM, for the rest of an idle system


@dataclass(frozen=True)
class HardwareProfile:
    """One node, and how many there are. Bytes and bytes per second; rates are peaks."""

    gpu: GpuPart | None  # None: the model computes on the CPU
    gpu_nbytes: int
    gpu_free_nbytes: int
    gpus: int  # per node
    ram_nbytes: int
    ram_free_nbytes: int
    ram_bytes_per_s: float  # 0: unknown
    nvme_nbytes: int  # free
    ssds: tuple[SsdPart, ...] = ()  # empty: rates and endurance unknown
    nodes: int = 1
    here: bool = False  # this machine: its speeds can be measured
    own_ram: bool = False  # the RAM is this machine's, as this process sees it
    notes: tuple[str, ...] = ()  # assumptions

    @property
    def text(self) -> str:
        """The hardware in words, such as `4 x RTX 4090, 64.0 GiB RAM, 1.0 TiB nvme, 2 nodes`."""
        name = self.gpu.name if self.gpu else "GPU of this machine"
        parts = [f"{self.gpus} x {name}" if self.gpus > 1 else name]
        if not self.gpu_nbytes:
            cores = f"{machine.cpu_model()}, {machine.cpu_count()} cores"
            parts = [cores if self.own_ram else "CPU only"]
        parts.append(f"{format_bytes(self.ram_nbytes)} RAM")
        if self.nvme_nbytes:
            parts.append(f"{format_bytes(self.nvme_nbytes)} nvme")
        if self.nodes > 1:
            parts.append(f"{self.nodes} nodes")
        return ", ".join(parts)

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes

    @property
    def usable_ram_nbytes(self) -> int:
        """The RAM of a node that a run may ever hold; described RAM is without the system's."""
        return self.ram_nbytes if self.own_ram else self.ram_free_nbytes

    @property
    def system_nbytes(self) -> int:
        """The RAM of a node that is kept for the system."""
        return self.ram_nbytes - self.usable_ram_nbytes

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The assumptions, and a sentence on RAM that is left to the system."""
        kept = self.system_nbytes
        if not kept:
            return self.notes
        return (
            *self.notes,
            f"of the {format_bytes(self.ram_nbytes)} of RAM, {format_bytes(kept)} are left to the "
            f"system: {format_bytes(self.usable_ram_nbytes)} can be filled",
        )

    def with_ram(self, nbytes: int) -> HardwareProfile:
        """Return the profile with `nbytes` of RAM in a node, of which what an idle system takes is
        kept for it."""
        free = max(nbytes // 2, nbytes - SYSTEM_NBYTES)
        return replace(self, ram_nbytes=nbytes, ram_free_nbytes=free, own_ram=False)

    def without_gpus(self) -> HardwareProfile:
        """Return the profile without GPUs: the model computes on the CPU."""
        return replace(self, gpu=None, gpu_nbytes=0, gpu_free_nbytes=0, gpus=0)

    def hardware(self, sharding: Sharding = ALONE) -> Hardware:
        """Return the hardware that one rank's plan may use: its GPU, and an even share of the
        node's RAM and disk."""
        ranks = self.ranks_per_node
        return Hardware(
            device_nbytes=self.gpu_free_nbytes,
            host_nbytes=self.usable_ram_nbytes // ranks,
            host_free_nbytes=self.ram_free_nbytes // ranks,
            nvme_free_nbytes=self.nvme_nbytes // ranks,
            kernels_missing=None if self.gpu_nbytes else "the model computes on the CPU",
            sharding=sharding,
            cores=max(1, machine.cpu_count() // ranks) if self.here else 1,
        )

    def speeds(self, measured: Speeds | None = None) -> Speeds | None:
        """Return one rank's sustained rates; None if the GPU's or the RAM's are unknown.

        `measured`: those of this machine, which hold where it computes; drives may be others.
        """
        share = SSD_SHARE / self.ranks_per_node  # of all drives
        read = sum(ssd.read_bytes_per_s for ssd in self.ssds) * share
        write = sum(ssd.write_bytes_per_s for ssd in self.ssds) * share
        endurance_nbytes = sum(ssd.endurance_nbytes for ssd in self.ssds) // self.ranks_per_node
        if self.here:
            if measured is None or not self.ssds:
                return measured
            return replace(
                measured, name=self.text, nvme_read_bytes_per_s=read, nvme_write_bytes_per_s=write,
                endurance_nbytes=endurance_nbytes,
            )  # fmt: skip
        gpu = self.gpu
        if gpu is None or not self.ram_bytes_per_s:
            return None
        ranks = self.ranks_per_node
        crossing = gpu.link_bytes_per_s * LINK_SHARE
        return Speeds(
            name=self.text,
            gpu=True,
            matmul_flops_per_s={p: rate * MATMUL_SHARE for p, rate in gpu.flops_per_s.items()},
            compute_bytes_per_s=gpu.bytes_per_s * MEMORY_SHARE,
            operation_s=OPERATION_S,
            host_bytes_per_s=self.ram_bytes_per_s * MEMORY_SHARE / ranks,
            nvme_read_bytes_per_s=read,
            nvme_write_bytes_per_s=write,
            host_to_device_bytes_per_s=crossing,
            device_to_host_bytes_per_s=crossing,
            endurance_nbytes=endurance_nbytes,
        )
