"""Checks whether the disk can hold a run's checkpoints, before the first step."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from offload.checkpoint.format.disk import free_nbytes
from offload.memory.tier_manager import nvme_paths, ranks_here
from offload.planning.plan.plan import needed_nbytes
from offload.tiers.errors import NoSpaceError
from offload.tiers.tier import Tier
from offload.tiers.units import in_one_unit

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.config.training import TrainConfig
    from offload.runs.forecast import Forecast


def checkpoints_beyond(found: Forecast, config: OffloadConfig, folder: Path) -> Iterator[str]:
    """Warn if the checkpoints that `folder` will hold at a time have no room beside the swap files,
    which are still to be made. Raise NoSpaceError if there is no room for a single one."""
    memory, plan = found.planned.memory, found.solution.best.plan
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    one, already = memory.checkpoint_nbytes, _there_already(folder)
    goes = _that_go(config.train, already)
    free = free_nbytes(there) + goes * one
    at_least = at_most = 0  # of swap files
    if plan.opens_files and _on_one_disk(there, nvme_paths(config.nvme)):
        at_least = ranks_here() * needed_nbytes(plan, Tier.NVME)
        at_most = ranks_here() * memory.places[Tier.NVME].peak_nbytes
    each, has, files, lacks = in_one_unit(one, free, at_most, at_least + one - free)
    beside = f" beside swap files of {files}" if at_most else ""
    others = f"{has} are free in {there}{beside}"
    if at_least + one > free:
        raise NoSpaceError(
            f"train.checkpoint_every: there is no room for a checkpoint of {each}: {others}; free "
            f"{lacks} there, or name another --run-dir",
            path=str(folder), nbytes=one, errno=errno.ENOSPC,
        )  # fmt: skip
    count = _most_at_a_time(config.train) - (already - goes)
    missing = at_most + count * one - free
    if count > 0 and missing > 0:
        each, lacks = in_one_unit(one, missing)
        yield (
            f"train.checkpoint_every: up to {count} more checkpoints of {each} at a time, but "
            f"{others}; free {lacks} there, name another --run-dir, or "
            "lower train.keep_last"
        )


def _on_one_disk(folder: Path, paths: list[str]) -> bool:
    return os.stat(folder).st_dev in {os.stat(path).st_dev for path in paths}


def _most_at_a_time(train: TrainConfig) -> int:
    """The most checkpoints at a time: the last ones, the one being written, and permanent ones."""
    every, kept = train.checkpoint_every, 0
    if train.keep_every is not None:
        kept = train.steps // math.lcm(every, train.keep_every)
    return min(math.ceil(train.steps / every), train.keep_last + 1 + kept)


def _that_go(train: TrainConfig, already: int) -> int:
    """The checkpoints that a resumed run removes at once, if it keeps fewer than before."""
    return 0 if train.keep_every is not None else max(0, already - train.keep_last)


def _there_already(folder: Path) -> int:
    return sum(not path.suffix for path in folder.glob("step-*"))
