"""Measures this machine's speeds once, keeps them in the user's cache, reads them without torch.

    $XDG_CACHE_HOME/offload/speeds/        (or ~/.cache/offload/speeds)
        compute-<digest>.json              by CPU, cores, torch version, GPUs
        nvme-<digest>.json                 by that and the file systems of the configured folders

A file that is damaged, of another machine or of another version counts as not there. Where the
folder cannot be written the measurement is used, not kept, and a warning says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import psutil

from offload.config.paths import StrPath
from offload.planning.machine.disk_cache import cache_folder, key_of, load, save
from offload.planning.machine.speeds import ComputeSpeeds, DiskSpeeds, Speeds
from offload.process import machine
from offload.tiers.errors import PathError

_log = logging.getLogger("offload")

FORMAT = 16  # raised whenever what is measured, or how, changes
_KIND, _SYSTEMS = "speeds", "file systems"
_MOST_BUSY = 0.3  # of the cores, by others
_LOOK_S = 0.2
_GPUS = Path("/proc/driver/nvidia/gpus")

Key = Mapping[str, Any]
_Part = TypeVar("_Part", ComputeSpeeds, DiskSpeeds)


def machine_speeds(nvme_paths: Sequence[StrPath] = (), *, remeasure: bool = False) -> Speeds:
    """Return this machine's speeds, with swap files in `nvme_paths` (none: in a temporary folder).

    Speeds that are not in the cache are measured, which takes some seconds, all cores and up to 4
    GiB of each folder's disk, and kept. Raises PathError if a folder cannot be used.
    """
    folders = _folders(nvme_paths)
    key = _compute_key()
    compute = None if remeasure else _kept(ComputeSpeeds, key)
    compute = compute or _measured(key, _measure_compute)
    key, gpu = _disk_key(folders), compute.gpu
    disk = None if remeasure else _kept(DiskSpeeds, key)
    return _speeds(compute, disk or _measured(key, lambda: _measure_disk(folders, gpu)))


def known_speeds(nvme_paths: Sequence[StrPath] = ()) -> Speeds | None:
    """Return what `machine_speeds` would, if it is in the cache; at once, without torch."""
    try:
        folders = _folders(nvme_paths)
    except PathError:
        return None
    compute = _kept(ComputeSpeeds, _compute_key())
    disk = _kept(DiskSpeeds, _disk_key(folders))
    return None if compute is None or disk is None else _speeds(compute, disk)


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


def _disk_key(folders: Sequence[Path]) -> dict[str, Any]:
    systems = []
    for folder in folders:
        there = folder if folder.is_dir() else folder.parent
        mount = machine.mount_of(there)
        kind, point = ("unknown", str(there)) if mount is None else (mount.kind, str(mount.point))
        systems.append([kind, point, there.stat().st_dev])
    return {**_compute_key(), _SYSTEMS: sorted(systems)}


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

    return measure_compute()


def _measure_disk(folders: Sequence[Path], gpu: bool) -> DiskSpeeds:
    from offload.planning.machine.speed_tests import measure_disk
    from offload.swap.io.swap_file import check_directory

    used = [check_directory(folder).path for folder in folders]
    return measure_disk(used, beside_compute=not gpu)


def _measured(key: Key, measure: Callable[[], _Part]) -> _Part:
    what = "speed of nvme.paths" if _SYSTEMS in key else "speed of computing"
    where = cache_folder() / _KIND
    _log.info("measuring this machine's %s, once; the result is kept in %s", what, where)
    busy = psutil.cpu_percent(_LOOK_S) / 100  # used by others before the measurement
    if busy > _MOST_BUSY:
        _log.warning(
            "other programs take %.0f %% of this machine's cores: its %s is measured as they leave "
            "it; measure again with memest calibrate when they are gone", 100 * busy, what,
        )  # fmt: skip
    found = measure()
    try:
        save(*_file(key), type(found), found)
    except OSError as error:
        _log.warning(
            "this machine's %s was measured and cannot be kept: %s (%s); set XDG_CACHE_HOME to a "
            "folder that can be written", what, error.strerror or error, where,
        )  # fmt: skip
    return found


# ---------------------------------------------------------------- the cache
def _file(key: Key) -> tuple[str, str]:
    """The folder and the name of a cache entry."""
    return _KIND, f"{'nvme' if _SYSTEMS in key else 'compute'}-{key_of(key)}"


def _kept(part: type[_Part], key: Key) -> _Part | None:
    """Return the measurement for `key`; None if there is no valid one."""
    found = load(*_file(key), part)
    return None if found is None else found[0]
