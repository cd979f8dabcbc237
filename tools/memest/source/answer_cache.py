"""Answers that took seconds to find, kept in the user's cache (`planning/disk_cache`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from offload.planning.machine import disk_cache

_T = TypeVar("_T")


def key_of(parts: Mapping[str, Any]) -> str:
    """A name for everything that an answer depends on: `parts`, and the code that finds it."""
    return disk_cache.key_of({"code": _code(), **parts})


def remembered(kind: str, key: str, answer: Any, find: Callable[[], _T]) -> _T:
    """The answer kept under `key`, else `find()`, kept where the cache can be written.

    `answer`: its type, a dataclass or a union. A file whose digest is wrong is as good as none.
    """
    adapter: TypeAdapter[_T] = TypeAdapter(answer)

    def decoded(values: Any) -> tuple[_T]:
        if values["digest"] != _digest(values["answer"]):
            raise ValueError("damaged")
        return (adapter.validate_python(values["answer"]),)

    kept = disk_cache.load(kind, key, decoded)
    if kept is not None:
        return kept[0]
    found = find()
    values = adapter.dump_python(found, mode="json")
    with suppress(OSError):
        disk_cache.save(kind, key, {"answer": values, "digest": _digest(values)})
    return found


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@cache
def _code() -> str:
    """A digest of the sources that find shapes and facts: another version, other answers."""
    root = Path(__file__).parents[3]  # the package: its folders, and links to them
    digest = hashlib.sha256()
    folders = ("config", "planning", "zero", "tools/memest/source")
    inside = (path for folder in folders for path in sorted((root / folder).glob("**/*.py")))
    for path in (root / "gpt.py", *inside):
        digest.update(path.read_bytes())
    return digest.hexdigest()
