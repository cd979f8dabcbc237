"""The meaning of every key of the configuration: its models, described in words.

`offload config explain` and the site's reference show it.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offload.config.fields import Kind, kind_of, section_of
from offload.config.file import dump_yaml
from offload.config.optimizer import BESIDE_MUON, KINDS
from offload.config.sections import OffloadConfig
from offload.config.suggestions import unknown_key
from offload.tiers.errors import ConfigError


@dataclass(frozen=True)
class Key:
    """A key, or a section with its keys."""

    path: tuple[str, ...]
    type: str
    unit: str  # "" where numbers have none, or there are none
    default: str
    meaning: str
    example: str  # YAML; "" for a section
    keys: tuple[Key, ...] = ()

    @property
    def name(self) -> str:
        """The full name, such as `optimizer.states`."""
        return ".".join(self.path)

    def all(self) -> Iterator[Key]:
        """Yield this key and those below it, in the order of a configuration file."""
        yield self
        for key in self.keys:
            yield from key.all()


@cache
def reference() -> Key:
    """Return the whole configuration as a key."""
    return _section((), OffloadConfig, "", "")


def explained(name: str) -> Key:
    """Return the key `name`, such as `optimizer.states`; "" is the whole configuration.

    Raise ConfigError naming the nearest keys if there is no such key.
    """
    known = {key.name: key for key in reference().all()}
    if name not in known:
        path = tuple(name.lower().split("."))
        section = known.get(".".join(path[:-1]))
        hint = unknown_key(path, OffloadConfig) if section and section.keys else ""
        raise ConfigError(f"{name}: unknown key{hint}")
    return known[name]


def _section(path: tuple[str, ...], model: type[BaseModel], meaning: str, absent: str) -> Key:
    keys = tuple(_key((*path, name), model, field) for name, field in model.model_fields.items())
    kind = "auto, or the keys below it" if path == ("placement",) else "the keys below it"
    return Key(path, kind, "", absent, meaning or (model.__doc__ or "").strip(), "", keys)


def _key(path: tuple[str, ...], model: type[BaseModel], field: FieldInfo) -> Key:
    said = _said(field)
    meaning = " ".join((field.description or "").split())
    section = section_of(field.annotation)
    if section is not None:
        return _section(path, section, meaning, said.get("x-absent", ""))
    kind = kind_of(field)
    return Key(
        path, kind.text, said.get("x-unit", ""), _default(path, model, field, kind), meaning,
        _example(path, field),
    )  # fmt: skip


def _said(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


# ---------------------------------------------------------------- defaults and examples
def _default(path: tuple[str, ...], model: type[BaseModel], field: FieldInfo, kind: Kind) -> str:
    if field.is_required():
        return "none: it has to be given"
    if path[0] == "optimizer" and any(path[-1] in each.defaults for each in KINDS.values()):
        return _by_type(path[-1])
    if path[-1] in BESIDE_MUON:
        return f"{_text(_plain(BESIDE_MUON[path[-1]]))} (muon)"
    if field.default is None:
        return str(_said(field).get("x-absent", kind.absent)) or "none"
    (value,) = model.model_construct().model_dump(mode="json", include={path[-1]}).values()
    return _text(value)


def _by_type(name: str) -> str:
    """Return the default of one of the optimizer's numbers, which depends on the type."""
    types: dict[str, list[str]] = {}
    for type_, kind in KINDS.items():
        if name in kind.defaults:
            types.setdefault(_text(_plain(kind.defaults[name])), []).append(type_)
    if len(types) == 1 and sum(map(len, types.values())) == len(KINDS):
        return next(iter(types))
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in types.items())


def _example(path: tuple[str, ...], field: FieldInfo) -> str:
    """Return the key with a value, on one line."""
    value = _plain(_example_value(field))
    for name in reversed(path):
        value = {name: value}
    return _text(value).removeprefix("{").removesuffix("}")


def _example_value(field: FieldInfo) -> Any:
    """Return the given example, or the first of a few words that is not the default."""
    if field.examples:
        return field.examples[0]
    if typing.get_origin(field.annotation) is Literal:
        return next(word for word in typing.get_args(field.annotation) if word != field.default)
    assert field.annotation is bool, f"{field} needs an example"
    return not field.default


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return dump_yaml(value, inline=True)
