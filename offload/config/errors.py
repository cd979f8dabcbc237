"""Turns the mistakes in a configuration into one screen of text.

One line per mistake: `FILE:LINE: KEY: what is wrong; what is allowed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from offload.config.fields import KeyedError, UnknownNameError, kind_of, section_of
from offload.config.file import KeyPath
from offload.config.suggestions import model_at, suggestion, unknown_key
from offload.tiers.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from offload.config.source import ConfigSource

MAX_SHOWN = 8


def render(error: ValidationError, model: type[BaseModel], source: ConfigSource) -> ConfigError:
    """Return one ConfigError for all of `error`, with at most `MAX_SHOWN` mistakes shown."""
    details = sorted(error.errors(), key=lambda detail: source.document.line_of(detail["loc"]) or 0)
    lines = list(dict.fromkeys(_line(detail, model, source) for detail in details))
    shown = lines[:MAX_SHOWN]
    if len(lines) > MAX_SHOWN:
        shown.append(f"... and {len(lines) - MAX_SHOWN} more")
    return ConfigError("\n".join(shown))


def _line(detail: ErrorDetails, model: type[BaseModel], source: ConfigSource) -> str:
    path: KeyPath = detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, KeyedError):
        section = ".".join(map(str, path))
        place = _place(source, path, cause)
        return f"{place}: {section + '.' if section else ''}{cause}"
    depth, field = _leaf(path, model)
    if field is not None and any(isinstance(part, str) for part in path[depth:]):
        # one of several types that the key may have: all of them are named at once
        path = path[:depth]
        problem = f"expected {kind_of(field).text}; found {_shown(detail['input'])}"
    else:
        problem = _problem(detail, path, model)
    return f"{source.place_of(path)}: {'.'.join(map(str, path))}: {problem}"


def _leaf(path: KeyPath, model: type[BaseModel]) -> tuple[int, FieldInfo | None]:
    """Return the first key of the path that is no section, after how many parts; None without."""
    section: type[BaseModel] | None = model
    for depth, part in enumerate(path, 1):
        field = section.model_fields.get(str(part)) if section else None
        section = section_of(field.annotation) if field else None
        if section is None:
            return depth, field
    return len(path), None


def _place(source: ConfigSource, section: KeyPath, cause: KeyedError) -> str:
    """Return the override among the contradicting keys, else the first of them that was given."""
    paths = [(*section, *path) for path in (cause.path, cause.other) if path is not None]
    given = [source.place_of(path) for path in paths if _given(source.value, path)]
    overriding = [place for place in given if place.startswith("-o ")]
    return next(iter([*overriding, *given]), source.place_of(paths[0]))


def _given(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _problem(detail: ErrorDetails, path: KeyPath, model: type[BaseModel]) -> str:
    kind, given = detail["type"], detail.get("input")
    cause = detail.get("ctx", {}).get("error")
    if kind == "extra_forbidden":
        return "unknown key" + unknown_key(path, model)
    if kind == "literal_error":
        expected = detail["ctx"]["expected"].replace(" or ", ", ").split(",")
        allowed = [word.strip("' ") for word in expected]
        return f"{_shown(given)} is not allowed" + suggestion(str(given), allowed)
    if kind == "missing":
        return "a value is missing"
    if isinstance(cause, UnknownNameError):
        return f"{cause}{suggestion(cause.name, cause.allowed)}"
    if kind == "value_error":
        return str(cause)
    if kind == "model_type":
        section = model_at(model, path)
        keys = f"; its keys: {', '.join(section.model_fields)}" if section else ""
        return f"must be keys and values, found {_shown(given)}{keys}"
    # pydantic's own words, with YAML's name of a list
    text = detail["msg"].replace("Input should be", "must be").replace("tuple", "list")
    return f"{text}, found {_shown(given)}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
