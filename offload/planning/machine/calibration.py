"""Measures this machine's speeds once, keeps them in the user's cache, reads them without torch.

    $XDG_CACHE_HOME/offload/speeds/        (or ~/.cache/offload/speeds)
        compute-<digest>.json              by CPU, cores, torch version, GPUs
        nvme-<digest>.json                 by that and the file systems of the configured folders

A file that is damaged, of another machine or of another version counts as not there.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from offload.config.paths import StrPath
from offload.planning.machine.speeds import ComputeSpeeds, DiskSpeeds, Speeds
from offload.process import machine
from offload.process.disk_cache import cache_folder, key_of, load, remembered
from offload.tiers.errors import PathError

_log = logging.getLogger("offload")

FORMAT = 18  # raised whenever what is measured, or how, changes
_KIND = "speeds"
_MAX_BUSY = 0.3  # of the cores, by others
_LOOK_S = 0.2
_GPUS = Path("/proc/driver/nvidia/gpus")


def machine_speeds(nvme_paths: Sequence[StrPath] = (), *, remeasure: bool = False) -> Speeds:
    """Return this machine's speeds, with swap files in `nvme_paths` (none: in a temporary folder).

    Speeds that are not in the cache are measured, which takes some seconds, all cores and up to 4
    GiB of each folder's disk, and kept. Raises PathError if a folder cannot be used.
    """
    folders = _folders(nvme_paths)
    compute = remembered(*_compute_file(), ComputeSpeeds, _measure_compute, anew=remeasure)
    measure = partial(_measure_disk, folders, compute.gpu)
    disk = remembered(*_disk_file(folders), DiskSpeeds, measure, anew=remeasure)
    return _speeds(compute, disk)


def known_speeds(nvme_paths: Sequence[StrPath] = ()) -> Speeds | None:
    """Return what `machine_speeds` would, if it is in the cache; at once, without torch."""
    try:
        folders = _folders(nvme_paths)
    except PathError:
        return None
    compute = load(*_compute_file(), ComputeSpeeds)
    disk = load(*_disk_file(folders), DiskSpeeds)
    return None if compute is None or disk is None else _speeds(compute[0], disk[0])


def _speeds(compute: ComputeSpeeds, disk: DiskSpeeds) -> Speeds:
    return Speeds(name="this machine", **asdict(compute), **asdict(disk))


# ---------------------------------------------------------------- what speeds depend on
def _folders(paths: Sequence[StrPath]) -> list[Path]:
    folders = [Path(path).expanduser().absolute() for path in paths]
    folders = folders or [machine.swap_folder()]
    for folder in folders:
        # the runtime makes the last component of a path that is missing
        if not folder.is_dir() and not folder.parent.is_dir():
            raise PathError(
                f"nvme.paths: {folder} does not exist and neither does {folder.parent}; is the "
                "drive mounted? Its speed is measured there"
            )
    return folders


def _compute_file() -> tuple[str, str]:
    """The folder and the name of the cache entry."""
    return _KIND, f"compute-{key_of(_compute_key())}"


def _disk_file(folders: Sequence[Path]) -> tuple[str, str]:
    systems = []
    for folder in folders:
        there = folder if folder.is_dir() else folder.parent
        mount = machine.mount_of(there)
        kind, point = ("unknown", str(there)) if mount is None else (mount.kind, str(mount.point))
        systems.append([kind, point, there.stat().st_dev])
    return _KIND, f"nvme-{key_of({**_compute_key(), 'file systems': sorted(systems)})}"


def _compute_key() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "cpu": machine.cpu_model(),
        "cores": machine.cpu_count(),
        "torch": machine.version_of("torch"),
        "numba": machine.version_of("numba"),
        "gpus": _gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _gpus() -> list[str]:
    """The models of the GPUs, from the driver's files."""
    models = []
    with suppress(OSError):
        for file in sorted(_GPUS.glob("*/information")):
            lines = file.read_text(errors="replace").splitlines()
            models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return models


# ---------------------------------------------------------------- measuring
def _measure_compute() -> ComputeSpeeds:
    from offload.planning.machine.speed_tests import measure_compute

    _tell_of_measuring("speed of computing")
    return measure_compute()


def _measure_disk(folders: Sequence[Path], gpu: bool) -> DiskSpeeds:
    from offload.planning.machine.speed_tests import measure_disk
    from offload.swap.io.swap_file import check_directory

    _tell_of_measuring("speed of nvme.paths")
    used = [check_directory(folder).path for folder in folders]
    return measure_disk(used, beside_compute=not gpu)


def _tell_of_measuring(what: str) -> None:
    _log.info(
        "measuring this machine's %s, once; the result is kept in %s", what, cache_folder() / _KIND
    )
    busy = psutil.cpu_percent(_LOOK_S) / 100  # used by others before the measurement
    if busy > _MAX_BUSY:
        _log.warning(
            "other programs take %.0f %% of this machine's cores: its %s is measured as they leave "
            "it; measure again with memest calibrate when they are gone", 100 * busy, what,
        )  # fmt: skip
