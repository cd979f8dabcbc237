"""Shapes of models that took seconds to build, kept on disk.

    $XDG_CACHE_HOME/offload/shapes/<sha256 of the configuration and the libraries' versions>.json

A file that cannot be read, or is damaged, is as good as none; one that cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.zero.layout import ParamShape
from offload.zero.model_shape import GroupShape, ModelShape, UnitShape

_FORMAT = 1  # of the files; raised when older ones are no longer understood
_MOST_NBYTES = 64 << 20


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/offload`, or `~/.cache/offload`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "offload"


def key_of(parts: Mapping[str, Any]) -> str:
    """A name for everything that an answer depends on."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def load_shape(key: str) -> ModelShape | None:
    """The shape kept under `key`; None if there is none that can be read."""
    path = _path(key)
    try:
        if path.stat().st_size > _MOST_NBYTES:
            return None
        return _decoded(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def save_shape(key: str, shape: ModelShape) -> None:
    """Keep a shape under `key`, whole or not at all."""
    path = _path(key)
    with contextlib.suppress(OSError):  # a full disk or a read-only home: the next answer is slow
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump(_encoded(shape), file, separators=(",", ":"))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise


def _path(key: str) -> Path:
    return cache_folder() / "shapes" / f"{key}.json"


def _encoded(shape: ModelShape) -> dict[str, Any]:
    return {
        "groups": [
            [group.name, [[param.names, param.shape, param.trainable] for param in group.params]]
            for group in shape.groups
        ],
        "units": [[unit.name, unit.groups, unit.repeated] for unit in shape.units],
    }


def _decoded(values: Any) -> ModelShape:
    """ValueError, KeyError or TypeError unless it is what `_encoded` gives."""
    groups = tuple(
        GroupShape(_text(name), tuple(_param(*param) for param in params))
        for name, params in values["groups"]
    )
    units = tuple(
        UnitShape(_text(name), tuple(_index(i, len(groups)) for i in indices), _bool(repeated))
        for name, indices, repeated in values["units"]
    )
    return ModelShape(groups, units)


def _param(names: Any, shape: Any, trainable: Any) -> ParamShape:
    return ParamShape(
        tuple(_text(name) for name in names),
        tuple(_index(size, 1 << 60) for size in shape),
        _bool(trainable),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _index(value: Any, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise ValueError(f"{value!r} is no number from 0 to {limit}")
    return value
