"""Paths as callers give them: text, `pathlib.Path` or any other `os.PathLike`."""

import os
import re
from pathlib import Path

from offload.tiers.errors import PathError

StrPath = str | os.PathLike[str]


def path_of(given: StrPath, argument: str) -> Path:
    """Return a Path. Raises PathError, naming the `argument`, for bytes, None and other objects."""
    return Path(path_text(given, argument))


def path_text(given: StrPath, argument: str) -> str:
    """Return the same as text, so that a URL keeps its slashes."""
    text: object = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str):
        remedy = "; decode it with os.fsdecode" if isinstance(text, bytes) else ""
        raise PathError(
            f"{argument}: expected a path (str or os.PathLike), found {type(text).__name__}{remedy}"
        )
    return text


def local_path_of(given: StrPath, argument: str) -> Path:
    """Return a Path. Raises PathError for a URL, also for one that went through a Path."""
    text = path_text(given, argument)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise PathError(
            f"{argument}: {text} is a URL, and a checkpoint is saved to and loaded from a folder "
            "of this machine; copy the whole folder there or back with your store's own tool, and "
            "compare what came with `offload checkpoint verify`"
        )
    return Path(text)
