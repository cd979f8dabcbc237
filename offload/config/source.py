"""Sources of configuration values: a file or a mapping, then overrides on top."""

import enum
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.config.file import MAX_DEPTH, Document, KeyPath, parse_document, read_document
from offload.config.paths import StrPath, path_of
from offload.tiers.errors import ConfigError


@dataclass(frozen=True)
class ConfigSource:
    """Merged values, and the place that an error about one of them names."""

    document: Document
    value: dict[str, Any]
    overrides: dict[KeyPath, str] = field(default_factory=dict)  # path -> the text as given

    def place_of(self, path: KeyPath) -> str:
        """Return `offload.yaml:7`, or the override's text, for an error about `path`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return f"-o {self.overrides[path[:length]]}"
        inside = [text for key, text in self.overrides.items() if path and key[: len(path)] == path]
        line = self.document.line_of(path)
        if line is None or (inside and path not in self.document.lines):
            return f"-o {inside[0]}" if inside else self.document.source
        return f"{self.document.source}:{line}"


def load_source(source: StrPath | Mapping[str, Any], overrides: Sequence[str] = ()) -> ConfigSource:
    """Read `source` and lay `overrides` (`key.sub=value`) over it, later ones winning."""
    if isinstance(source, Mapping):
        document = Document("config", _plain(source, ()))
    elif isinstance(source, str | os.PathLike):
        document = read_document(path_of(source, "config"))
    else:
        raise ConfigError(
            f"config: expected a path, a mapping or an OffloadConfig, found {type(source).__name__}"
        )
    value = {} if document.value is None else document.value
    if not isinstance(value, dict):
        raise ConfigError(
            f"{document.source}:1: expected keys and values, found {_shown(value)}; "
            "write for example `precision: bf16`"
        )
    merged = _copied(value)
    applied: dict[KeyPath, str] = {}
    for text in overrides:
        path, new = _parse_override(text)
        _assign(merged, path, new, text)
        applied = {key: old for key, old in applied.items() if key[: len(path)] != path}
        applied[path] = text
    return ConfigSource(document, merged, applied)


def _parse_override(text: str) -> tuple[KeyPath, Any]:
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        meant = re.fullmatch(r"([\w.]+):\s*(\S+)", text)
        example = f"{meant[1]}={meant[2]}" if meant else "optimizer.lr=3e-4"
        raise ConfigError(f"-o {text}: expected key=value, for example -o {example}")
    return parts, parse_document(value, f"-o {text}").value


def _assign(values: dict[str | int, Any], path: KeyPath, new: Any, text: str) -> None:
    for depth, part in enumerate(path[:-1], 1):
        inner = values.get(part)
        if not isinstance(inner, dict):
            if inner not in (None, "auto"):
                above = ".".join(map(str, path[:depth]))
                raise ConfigError(
                    f"-o {text}: {above} is {_shown(inner)}, which has no keys and would be lost; "
                    f"write -o {above}=... for the whole of it"
                )
            inner = values[part] = {}
        values = inner
    values[path[-1]] = new


def _copied(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _copied(value) for key, value in values.items()}
    return [_copied(value) for value in values] if isinstance(values, list) else values


def _plain(value: Any, path: KeyPath) -> Any:
    """Convert a mapping given by a program to the types that a YAML file would give."""
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"config: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, (*path, str(key))) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, index)) for index, inner in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.value if isinstance(value, enum.Enum) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
