"""Writes the files of an answer: as a whole, and only if that is allowed."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from offload.tiers.errors import PathError


def check_target(path: Path, option: str, *, replace: bool) -> None:
    """Raise PathError, before any work is done, if `path` cannot be written.

    `replace`: whether a file that is there may be.
    """
    if path.is_dir():
        raise PathError(f"{option} {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise PathError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not replace and path.is_file():
        raise PathError(f"{option} {path}: there is such a file; add --force to replace it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PathError(f"{option} {path}: not allowed to write there")


def write_file(path: Path, content: bytes, option: str) -> None:
    """Replace `path` as a whole, never half of it. Raise PathError if the system refuses."""
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(content)  # /dev/stdout, a pipe: nothing that could be replaced
        else:
            _replace(path, content)
    except OSError as error:
        raise PathError(f"{option} {path}: cannot be written: {error.strerror or error}") from None


def _replace(path: Path, content: bytes) -> None:
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(content)
        beside.replace(target)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
