"""Answers of memest that took seconds to find, kept in the user's cache (`planning/disk_cache`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from offload.planning.machine import disk_cache


def key_of(parts: Mapping[str, Any]) -> str:
    """A name for everything that an answer depends on: `parts`, and the code that finds it."""
    return disk_cache.key_of({"code": _code(), **parts})


def keep(kind: str, key: str, values: Any) -> None:
    """Keep an answer where the cache can be written; elsewhere the next one is slow, too."""
    with suppress(OSError):
        disk_cache.save(kind, key, values)


@cache
def _code() -> str:
    """A digest of the sources that find shapes and facts: another version, other answers."""
    root = Path(__file__).parents[2]  # the package: its folders, and links to them
    digest = hashlib.sha256()
    for folder in ("zero", "planning", "train", "tools/memest"):
        for path in sorted((root / folder).glob("**/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
