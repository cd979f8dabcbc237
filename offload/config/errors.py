"""Turns the mistakes in a configuration into one screen of text.

One line per mistake: `FILE:LINE: KEY: what is wrong; what is allowed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from offload.config.fields import KeyedError, UnknownNameError
from offload.config.file import KeyPath
from offload.config.remedies import left_out, model_at, other_shape, suggestion, unknown_key
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
    """Return one ConfigError for all of `error`, with at most `MAX_SHOWN` mistakes shown."""
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
    place = source.place_of(path)
    return f"{place}: {key}: {_problem(detail, path, model, place)}"


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


def _problem(detail: ErrorDetails, path: KeyPath, model: type[BaseModel], place: str) -> str:
    kind, found, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + unknown_key(path, found, model, place)
    if kind == "literal_error":
        allowed = _literals(context.get("expected", ""))
        return f"{_shown(found)} is not allowed" + suggestion(str(found), allowed)
    if kind in _COMPARISONS:
        name, words = _COMPARISONS[kind]
        none = left_out(path, found, model)
        return f"{_shown(found)} must be {words} {_number(context[name])}{none}"
    if kind == "missing":
        section = model_at(model, path[:-1])
        field = section.model_fields.get(str(path[-1])) if section else None
        return "a value is missing" + (suggestion("", get_args(field.annotation)) if field else "")
    if kind == "too_long":
        return f"at most {context['max_length']} values, found {context['actual_length']}"
    cause = context.get("error")
    if isinstance(cause, UnknownNameError):
        return f"{cause}{suggestion(cause.found, cause.allowed)}"
    remedy = other_shape(kind, str(cause), path, found, model, place)
    remedy = remedy or left_out(path, found, model)
    if kind == "value_error":
        return f"{cause}{remedy}"
    expected = _EXPECTED.get(kind)
    return f"expected {expected}, found {_shown(found)}{remedy}" if expected else detail["msg"]


def _literals(expected: str) -> tuple[str, ...]:
    return tuple(word.strip("' ") for word in expected.replace(" or ", ", ").split(",") if word)


def _number(value: Any) -> str:
    """Return a bound as text: 0 for 0.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
