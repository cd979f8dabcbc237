"""The hardware options, read: names of parts, sizes and counts, and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from offload.tiers.errors import ConfigError
from offload.tiers.units import format_bytes, parse_bytes

MOST_COUNT = 1 << 20


class Named(Protocol):
    @property
    def name(self) -> str: ...


_Part = TypeVar("_Part", bound=Named)


def find_part(text: str, parts: Iterable[_Part]) -> _Part | None:
    """The part of that name; case, spaces, hyphens and the maker's name do not matter, and a
    beginning that only one part has is enough."""
    wanted = plain_name(text)
    named = {plain_name(part.name): part for part in parts}
    if wanted in named:
        return named[wanted]
    short = [part for name, part in named.items() if wanted and name.startswith(wanted)]
    return short[0] if len(short) == 1 else None


def plain_name(name: str) -> str:
    kept = "".join(each for each in name.lower() if each.isalnum())
    for maker in ("nvidia", "geforce", "tesla", "gb"):
        kept = kept.replace(maker, "")
    return kept


def unknown_part(text: str, parts: Sequence[Named]) -> str:
    names = [part.name for part in parts]
    several = [name for name in names if plain_name(name).startswith(plain_name(text))]
    if plain_name(text) and len(several) > 1:
        return f"it could be {' or '.join(several)}; say which"
    like = difflib.get_close_matches(text.strip(), names, n=1, cutoff=0.4)
    hint = f"; did you mean {like[0]!r}?" if like else ""
    known_names = ", ".join(dict.fromkeys(names))
    return f"no such part{hint}; known are {known_names}, or write a size like 24GiB"


def read_size(text: str, option: str, least: int, most: int) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not least <= nbytes <= most:
        raise ConfigError(
            f"{option} {text}: {format_bytes(nbytes)} is not between {format_bytes(least)} and "
            f"{format_bytes(most)}; write for example 24GiB"
        )
    return nbytes


def read_count(value: int | None, option: str, least: int) -> int | None:
    if value is not None and not least <= value <= MOST_COUNT:
        raise ConfigError(f"{option} {value}: write {least} to {MOST_COUNT}")
    return value
