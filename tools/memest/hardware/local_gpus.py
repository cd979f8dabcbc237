"""The GPUs of this machine without torch, as listed by `nvidia-smi`, which the driver includes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 30.0
_QUERY = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")  # in MiB


@dataclass(frozen=True)
class LocalGpu:
    """A GPU that CUDA would show to this process."""

    name: str
    nbytes: int
    free_nbytes: int


def local_gpus(program: str = "nvidia-smi") -> list[LocalGpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` selects, in the driver's order; none without
    one."""
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
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` selects; of names that are not numbers (UUIDs),
    only their count is used."""
    if setting is None:
        return gpus
    names = [each.strip() for each in setting.split(",") if each.strip()]
    if not all(name.isdecimal() for name in names):
        return gpus[: sum(name != "-1" for name in names)]
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]
