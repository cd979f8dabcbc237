"""The measurements of a machine with a GPU: sizes, and speeds."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload.bench.record import this_machine
from offload.bench.stream import optimizer_loop
from offload.planning.machine.calibration import machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.process import machine
from offload.process.child import Parent
from offload.swap.io.swap_file import free_space
from offload.tiers import accelerator

_BUS_NUMEL = 1 << 26  # 1.2 GB of states: beyond any cache
_ROUNDS = 7
_CLOCKS = (
    "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu",
    "clocks_throttle_reasons.active", "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip


@dataclass(frozen=True)
class GpuMachine:
    """Bytes that may still be taken, and speeds in bytes per second."""

    device_nbytes: int
    host_nbytes: int
    disk_nbytes: int
    bus_bytes_per_s: float  # of the optimizer's traffic on all cores, without arithmetic
    speeds: Speeds  # as the planner measures them

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GpuMachine:
        """TypeError for values of another version's."""
        return cls(**{**values, "speeds": Speeds(**values["speeds"])})


def probe(options: Mapping[str, Any], parent: Parent) -> None:
    """A child's program: `machine` for `GpuMachine`, `hardware` to be named in the record. Takes
    about 20 seconds."""
    device = accelerator.default_device()
    folder = Path(options["folder"])
    with ExitStack() as stack:
        loop = optimizer_loop("bf16", _BUS_NUMEL, machine.cpu_count(), stack)
        loop()
        bus_bytes_per_s = statistics.median(loop.speed() for _ in range(_ROUNDS))
    measured = GpuMachine(
        device_nbytes=accelerator.free_nbytes(device),
        host_nbytes=machine.available_memory_nbytes(),
        disk_nbytes=free_space(folder),
        bus_bytes_per_s=bus_bytes_per_s,
        speeds=machine_speeds([folder], remeasure=True),
    )
    answer = {"machine": asdict(measured), "hardware": describe(device), "clocks": clocks()}
    parent.answer(answer)


def describe(device: torch.device) -> dict[str, Any]:
    """Names and versions, besides the ones that every bench records of the machine."""
    facts = accelerator.of(device).facts(device)
    described = this_machine() | {
        "gpu": facts.name,
        "gpu_memory_nbytes": facts.memory_nbytes,
        "multiprocessors": facts.multiprocessors,
        "compute_capability": facts.compute_capability,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }
    try:
        import triton
    except ImportError:
        return described
    return described | {"triton": triton.__version__}


def clocks() -> dict[str, str]:
    """Clocks, power, temperature and the link of the first GPU, now; empty without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_CLOCKS, shown.stdout.partition("\n")[0].split(", "), strict=False))
