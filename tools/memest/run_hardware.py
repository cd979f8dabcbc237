"""From the hardware options to a profile and its speeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from offload.config import OffloadConfig
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.tiers.errors import ConfigError
from offload.tools.memest.options import MachineOptions
from offload.tools.memest.profiles import HardwareProfile, read_profile


def profile_of(asked: MachineOptions, config: OffloadConfig) -> HardwareProfile:
    """The hardware to plan for. ConfigError naming the option that is wrong."""
    paths = [Path(path).expanduser() for path in config.nvme.paths]
    gpu = asked.profile if asked.profile is not None else asked.gpu
    option = "--profile" if asked.profile is not None else "--gpu"
    drive = asked.ssd if asked.ssd is not None else asked.nvme
    with _named("--gpu", option), _named("--nvme", "--nvme" if asked.ssd is None else "--ssd"):
        profile = read_profile(
            gpu, asked.ram, drive, asked.gpus, asked.nodes, nvme_paths=paths, reserve=asked.reserve
        )
    if asked.ssd is not None and asked.nvme is not None:
        sized = read_profile(gpu, asked.ram, asked.nvme, asked.gpus, asked.nodes, nvme_paths=paths)
        if not profile.ssds:
            raise ConfigError(f"--ssd {asked.ssd}: name a drive; its size is --nvme {asked.nvme}")
        profile = replace(profile, nvme_nbytes=sized.nvme_nbytes, name=sized.name)
    if asked.ram is not None and drive is not None:  # then nothing is this machine's
        notes = tuple(note for note in profile.notes if not note.startswith("RAM and disk, where"))
        profile = replace(profile, notes=notes)
    return _computing_where_it_should(profile, config)


@contextmanager
def _named(option: str, shown: str) -> Iterator[None]:
    """Errors about `option` name the one that was given."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if shown != option and text.startswith((f"{option} ", f"{option}:")):  # no --gpus
            raise ConfigError(shown + text.removeprefix(option)) from None
        raise


def _computing_where_it_should(
    profile: HardwareProfile, config: OffloadConfig
) -> HardwareProfile:  # fmt: skip
    if config.device == "cuda" and not profile.gpu_nbytes:
        raise ConfigError(
            "device: cuda, but this hardware has no GPU; name one with --gpu, or set -o device=cpu"
        )
    if config.device == "cpu" and profile.gpu_nbytes:
        return replace(profile, gpu=None, gpu_nbytes=0, gpu_free_nbytes=0, gpus=0, link=None)
    return profile


def speeds_of(
    profile: HardwareProfile, config: OffloadConfig, *, measure: bool
) -> Speeds | None:  # fmt: skip
    """One rank's speeds; this machine's are measured if they never were and `measure` is set."""
    if not profile.here:
        return profile.speeds()
    paths = config.nvme.paths
    found = known_speeds(paths)
    if found is None and measure:
        print(
            "measuring this machine's speeds, once; --no-measure leaves times out ...",
            file=sys.stderr,
            flush=True,
        )
        found = machine_speeds(paths)
    return profile.speeds(found)
