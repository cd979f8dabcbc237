"""GPUs of this machine without torch: NVIDIA's management library, through ctypes.

It comes with the driver; where there is none, there is no GPU that could be used.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_OK = 0
_NAME_NBYTES = 96


@dataclass(frozen=True)
class LocalGpu:
    """One GPU that CUDA would show this process."""

    name: str
    nbytes: int
    free_nbytes: int


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)
    ]  # fmt: skip


def local_gpus(library: str = "libnvidia-ml.so.1") -> list[LocalGpu]:
    """The GPUs, in the driver's order; empty without a driver. `CUDA_VISIBLE_DEVICES` counts."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    if nvml.nvmlInit_v2() != _OK:
        return []
    try:
        found = _read_all(nvml)
    finally:
        nvml.nvmlShutdown()
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: list[LocalGpu], setting: str | None) -> list[LocalGpu]:
    """Those that `CUDA_VISIBLE_DEVICES` leaves; names of another kind (UUIDs) only say how many."""
    if setting is None:
        return gpus
    names = [each.strip() for each in setting.split(",") if each.strip()]
    if not all(name.isdecimal() for name in names):
        return gpus[: sum(name != "-1" for name in names)]
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]


def _read_all(nvml: ctypes.CDLL) -> list[LocalGpu]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
        return []
    found = (_read(nvml, index) for index in range(count.value))
    return [gpu for gpu in found if gpu is not None]


def _read(nvml: ctypes.CDLL, index: int) -> LocalGpu | None:
    device, memory = ctypes.c_void_p(), _Memory()
    name = ctypes.create_string_buffer(_NAME_NBYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _OK:
        return None
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != _OK:
        return None
    nvml.nvmlDeviceGetName(device, name, _NAME_NBYTES)
    return LocalGpu(name.value.decode(errors="replace"), memory.total, memory.free)
