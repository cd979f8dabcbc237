"""How fast this machine is: measured once, kept in the user's cache, read without torch.

    $XDG_CACHE_HOME/offload/speeds/        (or ~/.cache/offload/speeds)
        compute-<digest>.json              by CPU, cores, torch version, GPUs
        nvme-<digest>.json                 by that and the file systems of the configured folders

A file that is damaged, of another machine or of another version counts as not there. What was
measured beside other programs is measured again as soon as they are gone. Where the folder cannot
be written the measurement is used and not kept, and that is said.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from offload import machine
from offload.planning.disk_cache import cache_folder, flag, key_of, load, save
from offload.planning.speeds import Speeds
from offload.tiers.errors import PathError

_log = logging.getLogger("offload")

FORMAT = 5  # raised whenever what is measured, or how, changes
_KIND = "speeds"
_MOST_BUSY = 0.3  # of the cores, by others
_LOOK_S = 0.2
_GPUS = Path("/proc/driver/nvidia/gpus")

Found = Mapping[str, Any]  # fields of `Speeds`
StrPath = str | os.PathLike[str]


def machine_speeds(nvme_paths: Sequence[StrPath] = (), *, remeasure: bool = False) -> Speeds:
    """This machine's speeds, with swap files in `nvme_paths` (none: in a temporary folder).

    What is not in the cache is measured, which takes some seconds, all cores and up to 512 MiB of
    each folder's disk, and is kept. PathError where a folder cannot be used.
    """
    folders = _folders(nvme_paths)
    compute, disk = _compute_key(), _disk_key(folders)
    found = None if remeasure else _settled("compute", compute)
    if found is None:
        found = _measured("compute", compute, _measure_compute)
    there = None if remeasure else _settled("nvme", disk)
    if there is None:
        gpu = bool(found["gpu"])
        there = _measured("nvme", disk, lambda: _measure_disk(folders, gpu))
    return _speeds(found, there)


def measure_speeds(nvme_paths: Sequence[StrPath] = ()) -> Speeds:
    """As `machine_speeds`, measured now and kept nowhere."""
    found = _measure_compute()
    return _speeds(found, _measure_disk(_folders(nvme_paths), bool(found["gpu"])))


def known_speeds(nvme_paths: Sequence[StrPath] = ()) -> Speeds | None:
    """What `machine_speeds` would give, if it has been measured before; at once, without torch.

    None also where that was beside other programs that are gone: it is time to measure again.
    """
    try:
        folders = _folders(nvme_paths)
    except PathError:
        return None
    found, there = _settled("compute", _compute_key()), _settled("nvme", _disk_key(folders))
    return None if found is None or there is None else _speeds(found, there)


def _speeds(compute: Found, disk: Found) -> Speeds:
    return Speeds(name="this machine", **{**compute, **disk})


# ---------------------------------------------------------------- whose speeds
def _folders(paths: Sequence[StrPath]) -> list[Path]:
    folders = [Path(path).expanduser().absolute() for path in paths]
    folders = folders or [Path(tempfile.gettempdir())]
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
        "torch": _version("torch"),
        "numba": _version("numba"),
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
    return {**_compute_key(), "file systems": sorted(systems)}


def _gpus() -> list[str]:
    """Models of the GPUs that the driver has, without asking it."""
    models = []
    with suppress(OSError):
        for file in sorted(_GPUS.glob("*/information")):
            lines = file.read_text(errors="replace").splitlines()
            models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return models


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


# ---------------------------------------------------------------- measuring
def _measure_compute() -> dict[str, Any]:
    from dataclasses import asdict

    from offload.planning.speed_tests import measure_compute

    return asdict(measure_compute())


def _measure_disk(folders: Sequence[Path], gpu: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from offload.planning.speed_tests import measure_disk
    from offload.swap.swap_file import check_directory

    used = [check_directory(folder).path for folder in folders]
    return asdict(measure_disk(used, beside_compute=not gpu))


def _measured(kind: str, key: Found, measure: Callable[[], dict[str, Any]]) -> Found:
    what = "speed of computing" if kind == "compute" else "speed of nvme.paths"
    where = cache_folder() / _KIND
    _log.info("measuring this machine's %s, once; the result is kept in %s", what, where)
    busy = _busy_share()
    if busy > _MOST_BUSY:
        _log.warning(
            "other programs take %.0f %% of this machine's cores: its %s is measured as they leave "
            "it, and measured again when they are gone", 100 * busy, what,
        )  # fmt: skip
    found = measure()
    try:
        save(*_file(kind, key), {"key": key, "busy": busy > _MOST_BUSY, "speeds": found})
    except OSError as error:
        _log.warning(
            "this machine's %s was measured and cannot be kept: %s (%s); set XDG_CACHE_HOME to a "
            "folder that can be written", what, error.strerror or error, where,
        )  # fmt: skip
    return found


def _busy_share() -> float:
    """Of all cores, what is taken before we do anything."""
    return psutil.cpu_percent(_LOOK_S) / 100


# ---------------------------------------------------------------- the cache
def _file(kind: str, key: Found) -> tuple[str, str]:
    """Folder and name in the cache."""
    return _KIND, f"{kind}-{key_of(key)}"


def _settled(kind: str, key: Found) -> Found | None:
    """What was measured on a quiet machine, or is still the best there is."""
    was_busy = load(*_file(kind, key), lambda values: flag(values["busy"]))
    if was_busy and _busy_share() <= _MOST_BUSY:
        return None
    return _load(kind, key)


def _load(kind: str, key: Found) -> Found | None:
    """What was measured for `key`; None where nothing valid is kept."""

    def decode(values: Any) -> Found:
        found = values["speeds"]
        if values["key"] != json.loads(json.dumps(key)) or not _is_valid(kind, found):
            raise ValueError("of another machine, or damaged")
        return dict(found)

    return load(*_file(kind, key), decode)


_NUMBERS = {
    "compute": (
        "compute_bytes_per_s", "operation_s", "host_bytes_per_s", "optimizer_lost_share",
        "host_to_device_bytes_per_s", "device_to_host_bytes_per_s",
    ),
    "nvme": (
        "nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "nvme_mixed_bytes_per_s",
        "io_lost_s_per_byte", "update_disk_share", "request_s",
    ),
}  # fmt: skip
_RATES = {
    "compute": ("compute_bytes_per_s", "host_bytes_per_s"),
    "nvme": ("nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "nvme_mixed_bytes_per_s"),
}  # never nothing
_TABLES = {
    "compute": ("matmul_flops_per_s", "optimizer_parameters_per_s", "compute_bytes_per_s_in"),
    "nvme": (),
}


def _is_valid(kind: str, found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    tables = _TABLES[kind]
    names = {*_NUMBERS[kind], *tables, *(("gpu",) if kind == "compute" else ())}
    if set(found) != names:
        return False
    numbers = [found[name] for name in _NUMBERS[kind]]
    for table in tables:
        if not isinstance(found[table], dict) or not found[table]:
            return False
        numbers += list(found[table].values())
    if not all(
        isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < float("inf")
        for n in numbers
    ):
        return False
    rates = [found[name] for name in _RATES[kind]]
    return all([*rates, *(rate for table in tables for rate in found[table].values())])
