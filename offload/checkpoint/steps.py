"""Checkpoints of a run, side by side: `step-000100`, `step-000200`, ..."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from offload.checkpoint.folder import discard, recover
from offload.checkpoint.reader import CheckpointReader, is_complete
from offload.tiers.errors import CheckpointError, PathError

_STEP = re.compile(r"step-(\d+)")
_log = logging.getLogger("offload")


def step_path(folder: Path, step: int) -> Path:
    """The name of the checkpoint of a step."""
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a name stands for, with any number of digits; None if it is no such name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest step in `folder` that is whole, None if there is none.

    Adopts a checkpoint that a killed writer had finished. Every file is there in full length;
    hashes are checked by the load. A torn checkpoint (a partial copy, say) is passed over with a
    warning.
    """
    if not folder.is_dir():
        return None
    try:
        recover(folder)
    except OSError as error:  # a read-only file system
        _log.info("leftovers in %s stay: %s", folder, error.strerror)
    for path in reversed(_steps(folder)):
        try:
            with CheckpointReader(path) as reader:
                reader.check(contents=False)
            return path
        except CheckpointError as error:
            _log.warning("passed over %s: %s", path, error)
    return None


def prune(folder: Path, keep_last: int) -> list[Path]:
    """Remove all but the `keep_last` (at least 1) highest steps that are whole; what was removed,
    oldest first. Torn ones do not count; those below the lowest step that stays are removed, too.

    A folder that only has such a name, or holds other files as well, stays, with a warning.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least one checkpoint has to stay")
    steps = _steps(folder)
    kept = [path for path in steps if is_complete(path)][-keep_last:]
    return [path for path in steps[: steps.index(kept[0])] if _discard(path)] if kept else []


def _discard(path: Path) -> bool:
    try:
        return not path.is_symlink() and discard(path)
    except PathError as error:
        _log.warning("not removed: %s", error)
        return False


def _steps(folder: Path) -> list[Path]:
    """By step, ascending."""
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]
