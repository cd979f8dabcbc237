"""A cache on disk, as JSON, of results that take seconds to find.

    $XDG_CACHE_HOME/offload/<kind>/<sha256 of all that it depends on>.json    (or ~/.cache/offload)

A file that cannot be read, or is damaged, counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

# Of dataclasses that pydantic reads back.
Nbytes = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]

_T = TypeVar("_T")
_MOST_NBYTES = 64 << 20


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/offload`, or `~/.cache/offload`; not absolute where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "offload"


def key_of(parts: Mapping[str, Any]) -> str:
    """A name for everything that an answer depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def load(kind: str, key: str, decode: Callable[[Any], _T]) -> _T | None:
    """What is kept under `key`; None if there is nothing that can be read.

    `decode` raises ValueError, KeyError or TypeError for values that it did not expect.
    """
    try:
        path = _path(kind, key)
        if path.stat().st_size > _MOST_NBYTES:
            return None
        return decode(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def save(kind: str, key: str, values: Any) -> None:
    """Keep `values` under `key`: a reader sees all of them or those before. OSError where that
    cannot be done (a full disk, a read-only home); the next answer is as slow then."""
    path = _path(kind, key)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            json.dump(values, file, separators=(",", ":"))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _path(kind: str, key: str) -> Path:
    folder = cache_folder()
    if not folder.is_absolute():
        raise FileNotFoundError(f"{folder}: there is no home folder; set XDG_CACHE_HOME")
    return folder / kind / f"{key}.json"
