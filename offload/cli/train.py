"""`offload train`: load the configuration, open the run's folder, hand over to the loop."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from offload.config import OffloadConfig
from offload.runs.folder import RunFolder, default_path
from offload.tiers.errors import ConfigError


def run_training(file: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool) -> None:
    """Train as `file` says. Raise ConfigError before anything heavy is imported."""
    config = OffloadConfig.load(file, overrides)
    if config.written_for is not None:
        config.written_for.refuse()
    if resume and run_dir is None:
        raise ConfigError("--resume: which run? add --run-dir DIR")
    if int(os.environ.get("RANK", "0")):  # of `torchrun`: the first rank has the folder
        folder = RunFolder(run_dir or Path(), writes=False)
    elif resume and run_dir is not None:
        folder = RunFolder.reopen(run_dir)
    else:
        folder = RunFolder.new(run_dir or default_path(file.stem))
    from offload.train.loop import run

    run(config, folder, resume=resume, resume_with=resuming_command(file, overrides, folder.path))


def resuming_command(file: Path, overrides: Sequence[str], run_dir: Path) -> str:
    """Return the shell command that resumes the run, for the current folder."""
    options = [word for override in overrides for word in ("-o", override)]
    words = ["offload", "train", str(file), *options, "--run-dir", str(run_dir), "--resume"]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = "" if ranks == 1 else "torchrun [options as before] -m "
    return launcher + shlex.join(words)
