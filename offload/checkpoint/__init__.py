"""Checkpoints: a folder of safetensors files and a manifest, complete or absent.

    step-000100/
        manifest.json                   names, shapes, steps, numbers, XXH3 of every file's blocks
        parameters/000.safetensors      one file per group: true names and shapes, model precision
        optimizer/000.safetensors       NAME.exp_avg, NAME.exp_avg_sq, NAME.low or NAME.master, ...
        buffers.safetensors             persistent buffers (others are the model's code to rebuild)
        run.safetensors                 what goes on beside the engine: generators, ...

Nothing in it says where a state lived or how it was cut into chunks: it loads under any placement,
budget, chunk size and grouping. There is no file that names the latest
checkpoint: a folder without a suffix is complete, so there is nothing that could disagree with it.
Those of a run stand side by side: `step-000100`, `step-000200`, ...
"""

import logging
import re
from pathlib import Path

from offload.checkpoint.format.disk import entries, is_folder, storage_errors
from offload.checkpoint.format.folder import discard, recover
from offload.checkpoint.format.reader import CheckpointReader
from offload.config.paths import StrPath, path_of
from offload.tiers.errors import CheckpointError, PathError, StorageError

__all__ = ["has_steps", "latest", "prune", "step_path"]

_STEP = re.compile(r"step-(\d+)")
_log = logging.getLogger("offload")


def step_path(folder: StrPath, step: int) -> Path:
    """The name of the checkpoint of a step."""
    return path_of(folder, "folder") / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a name stands for, with any number of digits; None if it is no such name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def latest(folder: StrPath, before: int | None = None) -> Path | None:
    """The checkpoint with the highest step in `folder` that is whole, None if there is none.
    `before`: of those with a lower step, where that one turned out to be damaged.

    Adopts a checkpoint that a killed writer had finished. Every file is there in full length;
    hashes are checked by the load. A torn checkpoint (a partial copy, say) is passed over with a
    warning. StorageError where checkpoints exist, and the disk lets none be read.
    """
    folder = path_of(folder, "folder")
    if not _is_folder(folder):
        return None
    try:
        recover(folder)
    except OSError as error:  # a read-only file system
        _log.info("leftovers in %s stay: %s", folder, error.strerror)
    unread: StorageError | None = None
    for path in reversed(_steps(folder, before)):
        try:
            _check(path)
            return path
        except (CheckpointError, StorageError) as error:
            _log.warning("passed over %s: %s", path, error)
            unread = error if isinstance(error, StorageError) else unread
    if unread is not None:  # None would have a run begin again
        raise unread
    return None


def has_steps(folder: StrPath) -> bool:
    """Whether there are checkpoints, or leftovers of some."""
    path = path_of(folder, "folder")
    return _is_folder(path) and bool(_steps(path))


def prune(folder: StrPath, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Remove all but the `keep_last` (at least 1) highest steps that are whole, and of the others
    those of each `keep_every`-th step; returns the removed, oldest first. Torn ones do not count,
    and stay: a disk may have misread what is whole.

    A folder that only has such a name, or holds other files as well, stays, with a warning.
    StorageError, and nothing is removed, where the disk does not say which are whole.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least one checkpoint has to stay")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every is {keep_every}; it is a number of steps")
    folder = path_of(folder, "folder")
    if not _is_folder(folder):
        return []
    whole = [path for path in _steps(folder) if _is_whole(path)]
    stays = {path for path in whole if keep_every and not (step_of(path) or 0) % keep_every}
    return [path for path in whole[:-keep_last] if path not in stays and _discard(path)]


def _is_whole(path: Path) -> bool:
    try:
        _check(path)
    except CheckpointError as error:
        _log.warning("not removed, nor counted as one to keep: %s", error)
        return False
    return True


def _check(path: Path) -> None:
    """Raise CheckpointError if a checkpoint is torn."""
    with CheckpointReader(path) as reader:
        reader.check(contents=False)


def _discard(path: Path) -> bool:
    try:
        return not path.is_symlink() and discard(path)
    except PathError as error:
        _log.warning("not removed: %s", error)
        return False


def _is_folder(path: Path) -> bool:
    with storage_errors("looking at", path):
        return is_folder(path)


def _steps(folder: Path, before: int | None = None) -> list[Path]:
    """The checkpoints by step, ascending, below `before`."""
    with storage_errors("looking at", folder):
        paths = [folder / each.name for each in entries(folder)]
    steps = [(step, path) for path in paths if (step := step_of(path)) is not None]
    return [path for step, path in sorted(steps) if before is None or step < before]
