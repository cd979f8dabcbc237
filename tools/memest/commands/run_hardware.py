"""From the hardware options to a profile and its speeds."""

from __future__ import annotations

import sys
from pathlib import Path

from offload.config import OffloadConfig
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.options import MachineOptions
from offload.tools.memest.hardware.profiles import HardwareProfile, without_gpus
from offload.tools.memest.hardware.read_profile import read_profile


def profile_of(asked: MachineOptions, config: OffloadConfig) -> HardwareProfile:
    """The hardware to plan for. ConfigError naming the option that is wrong."""
    paths = [Path(path).expanduser() for path in config.nvme.paths]
    profile = read_profile(**vars(asked), nvme_paths=paths)
    if config.device not in ("auto", "cpu") and not profile.gpu_nbytes:
        raise ConfigError(
            f"device: {config.device}, but this hardware has no GPU; name one with --gpu, or set "
            "-o device=cpu"
        )
    return without_gpus(profile) if config.device == "cpu" else profile


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
