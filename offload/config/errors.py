"""Turning what is wrong with a configuration into one screen of text.

One line per mistake: `FILE:LINE: KEY: what is wrong; what is allowed`.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from offload.config.fields import KeyedError, UnknownNameError
from offload.config.file import KeyPath
from offload.tiers.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from offload.config.source import ConfigSource

MAX_SHOWN = 8

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
    "model_type": "keys and values",
    "dict_type": "keys and values",
}
_COMPARISONS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def render(error: ValidationError, model: type[BaseModel], source: ConfigSource) -> ConfigError:
    """One ConfigError for all of `error`, at most `MAX_SHOWN` mistakes shown."""
    found = sorted(error.errors(), key=lambda detail: source.document.line_of(detail["loc"]) or 0)
    lines = list(dict.fromkeys(_line(detail, model, source) for detail in found))
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
    key = ".".join(map(str, path))
    return f"{source.place_of(path)}: {key}: {_problem(detail, path, model)}"


def _place(source: ConfigSource, section: KeyPath, cause: KeyedError) -> str:
    """The override among the contradicting keys, else the first of them that was given."""
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
    kind, found, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        section = _model_at(model, path[:-1])
        allowed = tuple(section.model_fields) if section else ()
        return "unknown key" + suggestion(str(path[-1]), allowed)
    if kind == "literal_error":
        allowed = _literals(context.get("expected", ""))
        return f"{_shown(found)} is not allowed" + suggestion(str(found), allowed)
    if kind in _COMPARISONS:
        name, words = _COMPARISONS[kind]
        return f"{_shown(found)} must be {words} {context[name]}"
    if kind == "missing":
        return "a value is missing"
    if kind == "too_long":
        return f"at most {context['max_length']} values, found {context['actual_length']}"
    cause = context.get("error")
    if isinstance(cause, UnknownNameError):
        return f"{cause}{suggestion(cause.found, cause.allowed)}"
    if kind == "value_error":
        return str(cause)
    expected = _EXPECTED.get(kind)
    return f"expected {expected}, found {_shown(found)}" if expected else f"{detail['msg']}"


def suggestion(found: str, allowed: Iterable[str]) -> str:
    """`; did you mean `lr`? allowed: a, b, c`."""
    names = tuple(allowed)
    close = difflib.get_close_matches(found.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean `{close[0]}`?" if close else ";"
    return f"{hint} allowed: {', '.join(names)}" if names else ""


def _literals(expected: str) -> tuple[str, ...]:
    return tuple(word.strip("' ") for word in expected.replace(" or ", ", ").split(",") if word)


def _model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        current = section_of(field.annotation) if field else None
    return current


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a section, also of one that may be absent."""
    options: tuple[Any, ...] = (annotation,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
