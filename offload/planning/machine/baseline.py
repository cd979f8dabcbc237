"""The memory of a process before it has a model: interpreter, libraries, kernels, contexts.

It is measured once per machine in a separate process, which trains a model of a few thousand
parameters (`baseline_probe`), and kept in the user's cache (`disk_cache`) by precision and versions
of Python, torch and numba; if the cache cannot be written, the result is used and not kept. Nothing
here needs torch: `known_baseline` returns an earlier measurement or a documented default.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from offload.process import machine
from offload.process.disk_cache import Nbytes, key_of, load, remembered
from offload.tiers.errors import OffloadError

if TYPE_CHECKING:
    from offload.config import OffloadConfig

FORMAT = 6  # raised whenever what is measured, or how, changes
_TIMEOUT_S = 600.0  # it takes seconds; on a busy machine more

# Measured by `measure_baseline` on 2 cores (Intel Xeon with AMX), Python 3.11, torch 2.13 for
# CPUs, numba 0.68, kernels from numba's cache.
_DEFAULT_RAM_NBYTES = {"fp32": 410 << 20, "bf16": 422 << 20, "fp16": 422 << 20}
_DEFAULT_COMPILER_NBYTES = 107 << 20
# With a CUDA build of torch: its libraries' code and data in RAM. A round figure for CUDA 12 and
# 13, not measured.
GPU_RAM_NBYTES = 1536 << 20
# `budget.device` covers the runtime's device tier alone. A GPU also holds the tensors of passes
# (`planning/activations`), and these two. A process that trains has its context when it asks what
# is free, so there the context is counted twice, on the safe side.
# 1. The context, with PyTorch's and offload's kernels: what nvidia-smi shows of a process that ran
# some, on an H100 with torch 2.11 for CUDA 13. Without the code of cuBLAS's kernels.
GPU_CONTEXT_NBYTES = 612 << 20
# 2. cuBLAS's workspaces, of PyTorch's allocator: one for each thread and stream that multiplies
# (aten/src/ATen/cuda/CublasHandlePool.cpp; cuBLASLt shares it). Forward and backward have a thread
# each, and one stream. 32 MiB is Hopper's default, and that of deterministic runs (`:4096:8`), 8.1
# MiB that of NVIDIA's others.
GPU_NBYTES = GPU_CONTEXT_NBYTES + 2 * (32 << 20)

# Python's objects and PyTorch's for each parameter: the tensor, its module, hooks, states, extents.
# By the growth of thousands of small layers on nvme, each a group of its own: 17.4 KiB.
OBJECTS_NBYTES = 18 << 10

_KIND = "baseline"


@dataclass(frozen=True)
class Baseline:
    """The framework's memory in bytes. `measured`: on this machine; otherwise a default."""

    ram_nbytes: Annotated[Nbytes, Field(gt=0)]
    gpu_nbytes: Nbytes = 0
    measured: bool = False
    # that torch imports for checkpoints and for traces, whether or not anything is compiled
    compiler_nbytes: Nbytes = _DEFAULT_COMPILER_NBYTES

    def ram_of(self, config: OffloadConfig, parameters: int) -> int:
        """Bytes of RAM of a process with a model of so many parameters (tensors): its objects, and
        torch's compiler for checkpoints."""
        compiler = self.compiler_nbytes if config.placement.activations.checkpoint else 0
        return self.ram_nbytes + parameters * OBJECTS_NBYTES + compiler

    def that_plans(self) -> Baseline:
        """The baseline of the same process when it predicts its own run: it traces, which takes
        torch's compiler as checkpoints do."""
        return replace(self, ram_nbytes=self.ram_nbytes + self.compiler_nbytes, compiler_nbytes=0)


def known_baseline(precision: str, *, gpu: bool = False) -> Baseline:
    """Return the earlier measurement for `precision`, or the default; at once, without torch.
    With CUDA (`gpu`) the rest is from constants."""
    kept = load(_KIND, _key(precision), Baseline)
    baseline = kept[0] if kept is not None else Baseline(_DEFAULT_RAM_NBYTES[precision])
    if not gpu:
        return baseline
    ram_nbytes = max(baseline.ram_nbytes, GPU_RAM_NBYTES)
    return replace(baseline, ram_nbytes=ram_nbytes, gpu_nbytes=GPU_NBYTES)


def machine_baseline(precision: str, *, remeasure: bool = False) -> Baseline:
    """Like `known_baseline` without a GPU, but measure unknown ones, which takes some seconds."""
    find = partial(measure_baseline, precision)
    return remembered(_KIND, _key(precision), Baseline, find, anew=remeasure)


def measure_baseline(precision: str) -> Baseline:
    """Measure the peak RAM of a process that trains a tiny model, and what checkpoints add.

    Raises OffloadError if the measurement fails.
    """
    command = [sys.executable, "-m", "offload.train.baseline_probe", precision]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        ram, compiler = map(int, done.stdout.split()[-2:])
        return Baseline(ram, 0, True, compiler)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise OffloadError(
            f"the memory of a process without a model could not be measured: {said.strip()[-500:]}"
        ) from error


def _key(precision: str) -> str:
    return key_of({
        "format": FORMAT,
        "precision": precision,
        "python": platform.python_version(),
        "torch": machine.version_of("torch"),
        "numba": machine.version_of("numba"),
        "cpu": machine.cpu_model(),
        "threads": os.environ.get("OMP_NUM_THREADS") or machine.cpu_count(),
    })  # fmt: skip
