"""Suggestions for wrong keys and words."""

import difflib
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from offload.config.fields import section_of
from offload.config.file import KeyPath

_NONE_NEAR = {"fp8", "adafactor", "muon"}  # a name that looks alike is something else
_REMOVED = {  # keys of earlier versions, and what to do instead
    "micro_batches": (
        "; it was removed: leave it out, and call the model with smaller batches "
        "(gradient_accumulation_steps), or set placement.activations.checkpoint: true"
    ),
}


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return a suggestion such as `; did you mean `lr`? allowed: a, b, c`."""
    names = tuple(allowed)
    close = near(given, names)
    hint = f"; did you mean `{close}`?" if close else ";"
    return f"{hint} allowed: {', '.join(names)}" if names else ""


def near(given: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the one of `names` that is meant: the nearest, and host for cpu."""
    known = tuple(names)
    word = given.strip("[]'\" ").lower()
    if word == "cpu" and "host" in known:
        return "host"
    close = [] if word in _NONE_NEAR else difflib.get_close_matches(word, known, 1, cutoff)
    return next(iter(close), None)


def unknown_key(path: KeyPath, root: type[BaseModel]) -> str:
    """Return a hint for a key that its section does not have: its name here, or its section."""
    name = str(path[-1])
    if name in _REMOVED:
        return _REMOVED[name]
    section = model_at(root, path[:-1])
    names = tuple(section.model_fields) if section else ()
    home = _only_home(name, root) if near(name, names, 0.8) is None else None
    return suggestion(name, names) if home is None else f"; did you mean `{home}`?"


def _only_home(name: str, root: type[BaseModel]) -> str | None:
    """Return the least nested key of that name in another section."""
    paths = sorted(_paths_to(name, root), key=len)
    alone = len(paths) == 1 or (len(paths) > 1 and len(paths[0]) < len(paths[1]))
    return ".".join(paths[0]) if alone else None


def _paths_to(name: str, model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for key, field in model.model_fields.items():
        if key == name:
            yield (key,)
        inner = section_of(field.annotation)
        if inner is not None:
            yield from ((key, *path) for path in _paths_to(name, inner))


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section at a path."""
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        current = section_of(field.annotation) if field else None
    return current
