"""GPUs of this machine without torch, as `nvidia-smi` lists them: it comes with the driver."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 30.0
_QUERY = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")  # in MiB


@dataclass(frozen=True)
class LocalGpu:
    """One GPU that CUDA would show this process."""

    name: str
    nbytes: int
    free_nbytes: int


def local_gpus(program: str = "nvidia-smi") -> list[LocalGpu]:
    """The GPUs, in the driver's order; empty without a driver. `CUDA_VISIBLE_DEVICES` counts."""
    try:
        listed = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in listed.stdout.splitlines()]
    gpus = [
        LocalGpu(name, int(total) << 20, int(free) << 20)
        for name, total, free in rows
        if total.isdecimal() and free.isdecimal()  # "[N/A]": memory shared with the CPU
    ]
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: list[LocalGpu], setting: str | None) -> list[LocalGpu]:
    """Those that `CUDA_VISIBLE_DEVICES` leaves; names of another kind (UUIDs) only say how many."""
    if setting is None:
        return gpus
    names = [each.strip() for each in setting.split(",") if each.strip()]
    if not all(name.isdecimal() for name in names):
        return gpus[: sum(name != "-1" for name in names)]
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]
