"""A cache on disk, as JSON, of results that take seconds to find.

    $XDG_CACHE_HOME/offload/<kind>/<sha256 of all that it depends on>.json    (or ~/.cache/offload)

A file that cannot be read, or is damaged, counts as missing.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import Field, TypeAdapter

_log = logging.getLogger("offload")

# Of dataclasses that pydantic reads back.
Nbytes = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]

_T = TypeVar("_T")
_MAX_NBYTES = 64 << 20


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/offload` or `~/.cache/offload`; a relative path if there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "offload"


def key_of(parts: Any) -> str:
    """A hash of everything that an answer depends on, or of the answer."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def remembered(
    kind: str, key: str, answer: Any, find: Callable[[], _T], *, anew: bool = False
) -> _T:
    """Return the answer kept under `key`, unless `anew`; else that of `find()`, which is kept.

    Where it cannot be kept (a full disk, a read-only home) a warning says so.
    """
    known: tuple[_T] | None = None if anew else load(kind, key, answer)
    if known is not None:
        return known[0]
    result = find()
    try:
        _save(kind, key, answer, result)
    except OSError as error:
        _warn_once(kind, cache_folder(), error.strerror or str(error))
    return result


@cache
def _warn_once(kind: str, folder: Path, why: str) -> None:
    _log.warning(
        "%s cannot be kept in %s (%s) and will be found anew each time; set XDG_CACHE_HOME to a "
        "folder that can be written", kind, folder, why,
    )  # fmt: skip


def load(kind: str, key: str, answer: Any) -> tuple[Any] | None:
    """Return the answer kept under `key`, or None if there is none that can be read.

    `answer` is its type, which pydantic validates. A file with a wrong digest counts as missing.
    """
    try:
        path = _path(kind, key)
        if path.stat().st_size > _MAX_NBYTES:
            return None
        values = json.loads(path.read_bytes())
        if values["digest"] != key_of(values["answer"]):
            return None
        return (TypeAdapter(answer).validate_python(values["answer"]),)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _save(kind: str, key: str, answer: Any, result: Any) -> None:
    """Keep `result` under `key`, atomically for readers."""
    values = TypeAdapter(answer).dump_python(result, mode="json")
    path = _path(kind, key)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = json.dumps({"answer": values, "digest": key_of(values)}, separators=(",", ":"))
    file = path.with_name(f"{uuid4()}.tmp")
    try:
        file.write_text(kept)
        file.replace(path)
    finally:
        file.unlink(missing_ok=True)


def _path(kind: str, key: str) -> Path:
    folder = cache_folder()
    if not folder.is_absolute():
        raise FileNotFoundError(f"{folder}: there is no home folder; set XDG_CACHE_HOME")
    return folder / kind / f"{key}.json"
