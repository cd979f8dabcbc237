"""`offload train`: load the configuration, open the run's folder, hand over to the loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from offload.cli.located import located
from offload.config import OffloadConfig
from offload.runs.folder import RunFolder, default_path
from offload.tiers.errors import ConfigError


def run_training(file: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool) -> None:
    """Train as `file` says. ConfigError before anything heavy is imported."""
    config = OffloadConfig.load(file, overrides)
    if config.written_for is not None:
        with located(file, overrides):
            config.written_for.refuse_training()
    if resume and run_dir is None:
        raise ConfigError("--resume: which run? add --run-dir DIR")
    if int(os.environ.get("RANK", "0")):  # of `torchrun`: the first rank has the folder
        from offload.runs.world import FollowersFolder

        folder: RunFolder = FollowersFolder(run_dir or Path())
    elif resume and run_dir is not None:
        folder = RunFolder.reopen(run_dir)
    else:
        folder = RunFolder.new(run_dir or default_path(file.stem))
    from offload.train.loop import run

    with located(file, overrides):
        run(config, folder, resume=resume)
