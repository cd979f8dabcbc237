"""The ratings of GPUs, links and SSDs, each figure with its source.

Rates are peaks, as their makers print them; bytes per second in one direction. Dense matrix
products with 32-bit sums (what training uses), not the figures for sparse matrices or 16-bit sums.
`profiles` has the share of a peak that is reached in practice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30
GB, TB = 10**9, 10**12
TERA = 1e12


@dataclass(frozen=True)
class GpuPart:
    """One GPU. `flops_per_s`: dense matrix products by precision of their inputs."""

    name: str
    nbytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    link_bytes_per_s: float  # to its host
    host: tuple[str, float]  # the usual machine around it, and its RAM's bytes per second
    source: str


@dataclass(frozen=True)
class SsdPart:
    """One drive. A swap file is rewritten all the time: `write_bytes_per_s` is the rate that a
    drive sustains, not that of its cache for a minute."""

    name: str
    nbytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    endurance_nbytes: int  # rated: may be written in all
    source: str


# PCI-SIG: 8, 16, 32 GT/s x 16 lanes, 128b/130b encoding; GH200's data sheet: 900 GB/s both ways.
PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB  # x16
NVLINK_C2C = 450.0 * GB

# JEDEC transfer rate x 8 bytes x channels; of Grace the data sheet's.
DESKTOP_DDR4 = ("desktop, DDR4-3200 x 2", 51.2 * GB)
DESKTOP_DDR5 = ("desktop, DDR5-5600 x 2", 89.6 * GB)
SERVER_2018 = ("server, DDR4-2666 x 6", 128.0 * GB)
SERVER_2020 = ("server, DDR4-3200 x 8", 204.8 * GB)
SERVER_2023 = ("server, DDR5-4800 x 8", 307.2 * GB)
GRACE = ("Grace, LPDDR5X", 512.0 * GB)


def _gpu(
    name: str, mib: int, tflops: tuple[float, float], gb_per_s: float, link: float,
    host: tuple[str, float], source: str, *, bf16: bool = True,
) -> GpuPart:  # fmt: skip
    """Create a GPU; `tflops`: of fp32 (without TF32, PyTorch's default) and of 16-bit inputs."""
    fp32, half = (each * TERA for each in tflops)
    # a GPU without bf16 units computes it in fp32
    flops = {"fp32": fp32, "bf16": half if bf16 else fp32, "fp16": half}
    return GpuPart(name, mib * MIB, flops, gb_per_s * GB, link, host, source)


# Memory is nvidia-smi's total. Names are in order of age.
GPUS = (
    _gpu("V100-32", 32768, (15.7, 125.0), 900, PCIE3, SERVER_2018,
         "NVIDIA V100 data sheet (SXM)", bf16=False),
    _gpu("A100-40", 40960, (19.5, 312.0), 1555, PCIE4, SERVER_2020, "NVIDIA A100 data sheet (SXM)"),
    _gpu("A100-80", 81920, (19.5, 312.0), 2039, PCIE4, SERVER_2020, "NVIDIA A100 data sheet (SXM)"),
    _gpu("RTX 3090", 24576, (35.6, 71.0), 936, PCIE4, DESKTOP_DDR4,
         "NVIDIA GA102 white paper, fp32 accumulate"),
    _gpu("RTX 4090", 24564, (82.6, 165.2), 1008, PCIE4, DESKTOP_DDR5,
         "NVIDIA Ada white paper, fp32 accumulate"),
    _gpu("H100", 81559, (66.9, 989.4), 3352, PCIE5, SERVER_2023, "NVIDIA H100 data sheet (SXM)"),
    _gpu("H200", 143771, (66.9, 989.4), 4800, PCIE5, SERVER_2023, "NVIDIA H200 data sheet (SXM)"),
    _gpu("GH200", 97871, (66.9, 989.4), 4000, NVLINK_C2C, GRACE,
         "NVIDIA GH200 data sheet (96 GB HBM3)"),
    _gpu("RTX 5090", 32607, (104.8, 209.5), 1792, PCIE5, DESKTOP_DDR5,
         "NVIDIA RTX Blackwell white paper, fp32 accumulate"),
)  # fmt: skip


def _ssd(
    name: str, nbytes: int, read_mb: float, write_mb: float, endurance_tb: float, source: str
) -> SsdPart:
    mb = 1e6
    return SsdPart(name, nbytes, read_mb * mb, write_mb * mb, int(endurance_tb * TB), source)


GEN3 = _ssd("Gen3 SSD", 2 * TB, 3500, 1750, 1200,
            "Samsung 970 EVO Plus 2 TB data sheet; write beyond its TurboWrite buffer")  # fmt: skip
# Beyond their caches consumer drives write at about a fifth of their rating; few makers say so.
_BEYOND_CACHE = 0.2
GEN4 = _ssd("Gen4 SSD", 2 * TB, 7450, 6900 * _BEYOND_CACHE, 1200,
            "Samsung 990 PRO 2 TB data sheet; write beyond its cache: a fifth of 6900 MB/s, "
            "assumed")  # fmt: skip
GEN5 = _ssd("Gen5 SSD", 2 * TB, 14500, 12700 * _BEYOND_CACHE, 1200,
            "Crucial T705 2 TB data sheet; write beyond its cache: a fifth of 12700 MB/s, "
            "assumed")  # fmt: skip
GEN3_SERVER = _ssd("Gen3 server SSD", 3840 * GB, 3200, 2000, 5466,
                   "Samsung PM983 3.84 TB data sheet, 1.3 drive writes a day for 3 "
                   "years")  # fmt: skip
GEN4_SERVER = _ssd("Gen4 server SSD", 3840 * GB, 6800, 4000, 7008,
                   "Samsung PM9A3 3.84 TB data sheet, 1 drive write a day for 5 years")  # fmt: skip
GEN5_SERVER = _ssd("Gen5 server SSD", 7680 * GB, 12000, 6800, 14016,
                   "Samsung PM9D3a 7.68 TB data sheet, 1 drive write a day for 5 "
                   "years")  # fmt: skip
SSDS = (GEN3, GEN4, GEN5, GEN3_SERVER, GEN4_SERVER, GEN5_SERVER)
