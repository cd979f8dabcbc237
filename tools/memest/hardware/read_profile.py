"""Reads the hardware that options describe, and this machine's, into a profile."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from offload.config.suggestions import suggestion
from offload.process import machine
from offload.tiers.errors import ConfigError
from offload.tiers.units import format_bytes, parse_bytes
from offload.tools.memest.hardware.parts import GEN4, GPUS, SSDS, TB, GpuPart, SsdPart
from offload.tools.memest.hardware.profiles import HardwareProfile

_QUERY_TIMEOUT_S = 30.0
_QUERY = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")  # in MiB
_DRIVES = re.compile(r"(?:(\d{1,3})\s*x\s*)?(.+)")
FILE_SYSTEM_SHARE = 0.95  # ext4 keeps 5 % for the administrator
_MIN_MEMORY, _MAX_MEMORY = 256 << 20, 1 << 50
_MIN_DISK, _MAX_DISK = 1 << 30, 1 << 60


def read_profile(
    gpu: str | None = None, ram: str | None = None, nvme: str | None = None,
    gpus: int | None = None, nodes: int | None = None, *, nvme_paths: Sequence[Path] = (),
    ssd: str | None = None,
) -> HardwareProfile:  # fmt: skip
    """Return the hardware that options describe; what they leave open is taken from this machine.

    `gpu`: a size (`24GiB`), a part (`RTX 4090`) or `none`; `ram`: a size; `ssd`: drives (`Gen4
    SSD`, `4 x Gen4 SSD`); `nvme`: how much of the disk is free, by default all. Raise ConfigError,
    naming the option, for anything else.
    """
    profile = this_machine(nvme_paths)
    if gpu is not None:
        profile = _with_named(profile, gpu, open_=ram is None or (nvme is None and ssd is None))
    if ram is not None:
        profile = profile.with_ram(_size(ram, "--ram", _MIN_MEMORY, _MAX_MEMORY))
    profile = _with_drives(profile, nvme, ssd)
    if gpus and not profile.gpu_nbytes:
        raise ConfigError("--gpus: this machine has no GPU to count; name one with --gpu")
    if gpus:
        profile = replace(profile, gpus=gpus)
    return replace(profile, nodes=nodes or 1)


def this_machine(nvme_paths: Sequence[Path] = ()) -> HardwareProfile:
    """Return this machine's hardware for this process; `nvme_paths`: folders for swap files."""
    gpus = local_gpus()
    first = min(gpus, key=lambda each: each.free_nbytes, default=None)
    part = None
    if first is not None:  # the named part, by its name and memory
        name = plain_name(first.name)
        fitting = [gpu for gpu in GPUS if plain_name(gpu.name.partition("-")[0]) in name]
        part = min(fitting, key=lambda gpu: abs(gpu.nbytes - first.nbytes), default=None)
    return HardwareProfile(
        gpu=part,
        gpu_nbytes=first.nbytes if first else 0,
        gpu_free_nbytes=first.free_nbytes if first else 0,
        gpus=len(gpus),
        ram_nbytes=machine.memory_limit_nbytes(),
        ram_free_nbytes=machine.available_memory_nbytes(),
        ram_bytes_per_s=0.0,
        nvme_nbytes=_free_disk(nvme_paths),
        here=True,
        own_ram=True,
    )


@dataclass(frozen=True)
class LocalGpu:
    """A GPU that CUDA would show to this process."""

    name: str
    nbytes: int
    free_nbytes: int


def local_gpus(program: str = "nvidia-smi") -> list[LocalGpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` selects, in the driver's order; none without one.
    Of names that are not numbers (UUIDs), only their count is used."""
    try:
        listed = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in listed.stdout.splitlines()]
    gpus = [
        LocalGpu(name, int(total) << 20, int(free) << 20)
        for name, total, free in rows
        if total.isdecimal() and free.isdecimal()  # "[N/A]": memory shared with the CPU
    ]
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return gpus
    names = [each.strip() for each in setting.split(",") if each.strip()]
    if not all(name.isdecimal() for name in names):
        return gpus[: sum(name != "-1" for name in names)]
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]


def _free_disk(paths: Sequence[Path]) -> int:
    """Return the free bytes under folders (by default a temporary one), each file system once."""
    free: dict[int, int] = {}
    for path in paths or [machine.swap_folder()]:
        there = next((each for each in [path, *path.resolve().parents] if each.exists()), None)
        if there is not None:
            status = os.statvfs(there)
            free[there.stat().st_dev] = status.f_bavail * status.f_frsize
    return sum(free.values())


def _with_named(here: HardwareProfile, named: str, *, open_: bool) -> HardwareProfile:
    """Return the profile of a GPU, with this machine's RAM and disk. `open_`: some of these will
    stay."""
    notes = ["RAM and disk, where not given, are this machine's"] if open_ else []
    if plain_name(named) in ("none", "cpu", "0"):
        local = here.gpu_nbytes == 0
        return replace(here.without_gpus(), here=local, notes=() if local else tuple(notes))
    part = find_part(named, GPUS)
    if part is None:
        part, assumed = _of_size(named)
        notes.append(assumed)
    host, ram_bytes_per_s = part.host
    notes.append(f"RAM as fast as in a {host} ({ram_bytes_per_s / 1e9:.0f} GB/s)")
    return replace(
        here, gpu=part, gpu_nbytes=part.nbytes, gpu_free_nbytes=part.nbytes, gpus=1,
        ram_bytes_per_s=ram_bytes_per_s, here=False, notes=tuple(notes),
    )  # fmt: skip


def _of_size(text: str) -> tuple[GpuPart, str]:
    """Return a GPU of this much memory, with the rates of the named one nearest in size."""
    if not text.strip()[:1].isdigit():
        raise ConfigError(f"--gpu {text}: {_unknown(text, GPUS)}")
    nbytes = _size(text, "--gpu", _MIN_MEMORY, _MAX_MEMORY)
    near = min(GPUS, key=lambda gpu: (abs(gpu.nbytes - nbytes), gpu.flops_per_s["bf16"]))
    name = f"{format_bytes(nbytes)} GPU"
    note = f"a GPU's speed does not follow from its memory: assumed to be that of an {near.name}"
    return replace(near, name=name, nbytes=nbytes, source=f"assumed as {near.name}"), note


def _with_drives(profile: HardwareProfile, nvme: str | None, ssd: str | None) -> HardwareProfile:
    if ssd is not None:
        match = _DRIVES.fullmatch(ssd.strip())
        count, name = (int(match[1] or 1), match[2]) if match is not None else (1, ssd)
        part = find_part(name, SSDS)
        if part is None or count < 1:
            raise ConfigError(f"--ssd {ssd}: {_unknown(name, SSDS)} with --nvme")
        free = int(part.nbytes * count * FILE_SYSTEM_SHARE)
        profile = replace(profile, nvme_nbytes=free, ssds=(part,) * count)
    elif nvme is None and not profile.here and profile.nvme_nbytes and not profile.ssds:
        return with_assumed_drive(profile, profile.nvme_nbytes)
    if nvme is None:
        return profile
    if find_part(nvme, SSDS) is not None:
        raise ConfigError(f"--nvme {nvme}: is a drive, not a size; name it with --ssd")
    nbytes = 0 if nvme.strip() == "0" else _size(nvme, "--nvme", _MIN_DISK, _MAX_DISK)
    if ssd is None and nbytes:
        return with_assumed_drive(profile, nbytes)
    return replace(profile, nvme_nbytes=nbytes, ssds=profile.ssds if nbytes else ())


def with_assumed_drive(profile: HardwareProfile, nbytes: int) -> HardwareProfile:
    """Return the profile with a disk of which only the size is known: as fast, and for its size as
    durable, as a usual one.

    The speeds of this machine are not used: they hold where it computes, and were not asked for.
    """
    drive = replace(
        GEN4, nbytes=nbytes, endurance_nbytes=int(GEN4.endurance_nbytes * nbytes / GEN4.nbytes)
    )
    note = (
        f"a drive's speed does not follow from its size: assumed to be that of a {GEN4.name} with "
        f"{GEN4.endurance_nbytes // (GEN4.nbytes // TB) // TB} TB written per TB"
    )
    return replace(profile, nvme_nbytes=nbytes, ssds=(drive,), notes=(*profile.notes, note))


_Part = TypeVar("_Part", GpuPart, SsdPart)


def find_part(text: str, parts: Iterable[_Part]) -> _Part | None:
    """Return the part of that name; case, spaces, hyphens and the maker's name are ignored, and a
    prefix that only one part has is enough."""
    wanted = plain_name(text)
    named = {plain_name(part.name): part for part in parts}
    if wanted in named:
        return named[wanted]
    short = [part for name, part in named.items() if wanted and name.startswith(wanted)]
    return short[0] if len(short) == 1 else None


def plain_name(name: str) -> str:
    kept = "".join(each for each in name.lower() if each.isalnum())
    for maker in ("nvidia", "geforce", "tesla", "gb"):
        kept = kept.replace(maker, "")
    return kept


def _unknown(text: str, parts: Sequence[GpuPart] | Sequence[SsdPart]) -> str:
    names = [part.name for part in parts]
    return f"no such part{suggestion(text, names)}; or write a size like 24GiB"


def _size(text: str, option: str, min_nbytes: int, max_nbytes: int) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not min_nbytes <= nbytes <= max_nbytes:
        raise ConfigError(
            f"{option} {text}: {format_bytes(nbytes)} is not between "
            f"{format_bytes(min_nbytes)} and {format_bytes(max_nbytes)}; write for example 24GiB"
        )
    return nbytes
