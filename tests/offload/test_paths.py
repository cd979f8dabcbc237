"""Every public function that takes a path takes str, Path and any other os.PathLike.

The functions are found by walking what is public; that a `StrPath` becomes a Path before it is used
is for the type checker to see.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import offload
import offload.checkpoint
import offload.loggers
from offload.config.paths import path_of
from offload.errors import ConfigError

API = Path(__file__).parents[2] / "docs/api.md"
BESIDE_IT = (  # what the page on programming does not list
    *(f"offload.{name}" for name in offload.__all__),
    *(f"offload.checkpoint.{name}" for name in offload.checkpoint.__all__),
    *(f"offload.loggers.{name}" for name in vars(offload.loggers) if name.endswith("Logger")),
)  # fmt: skip
NAMES = re.compile(r"(path|folder|file|directory|out|source|destination)|.*_(dir|path|folder|file)")
THEIRS = {  # arguments of that name that are no path, or are the other library's to convert
    "offload.integrations.transformers.OffloadMixin.save_model(output_dir)",
    "offload.integrations.transformers.OffloadTrainer.save_model(output_dir)",
}


class OwnPath(os.PathLike[str]):
    """A path by its protocol alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __fspath__(self) -> str:
        return self._text


def public() -> Iterator[str]:
    yield from re.findall(r"^::: ([\w.]+)$", API.read_text(), re.M)
    yield from BESIDE_IT


def resolved(name: str) -> Any:
    """A module, or what it has by that name; skips without the other library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("offload"):
            pytest.skip(f"needs {error.name}")
    above, _, last = name.rpartition(".")
    return getattr(resolved(above), last)


def functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Of a module those that it defines, of a class its public methods."""
    public = resolved(name)
    if inspect.ismodule(public):
        for inner, value in vars(public).items():
            if inspect.isfunction(value) and value.__module__ == name and inner[0] != "_":
                yield f"{name}.{inner}", value
    elif inspect.isclass(public) and not issubclass(public, Exception):
        for inner, value in inspect.getmembers(public, callable):
            documented = (getattr(value, "__module__", "") or "").startswith("offload")
            if documented and (inner == "__init__" or inner[0] != "_"):
                yield f"{name}.{inner}", value
    elif inspect.isfunction(public):
        yield name, public


class _Known(dict[str, Any]):
    """Names of a module; what it imports for type checkers only stands for any object."""

    def __missing__(self, name: str) -> Any:
        return Path if name == "Path" else _Anything


class _Anything:
    def __class_getitem__(cls, key: Any) -> Any:
        return cls


@cache
def path_arguments(name: str) -> list[tuple[str, Any]]:
    """`function(argument)` and its type, of every argument that is a path."""
    arguments = []
    for function, value in functions(name):
        wrapped = inspect.unwrap(getattr(value, "__func__", value))
        known = _Known(vars(builtins) | getattr(wrapped, "__globals__", {}))
        for argument, text in inspect.get_annotations(wrapped).items():
            hint = eval(text, {}, known) if isinstance(text, str) else text
            kinds = [hint, *typing.get_args(hint)]
            says = any("Path" in str(kind) for kind in kinds)
            if argument != "return" and (says or (NAMES.fullmatch(argument) and str in kinds)):
                arguments.append((f"{function}({argument})", hint))
    return [each for each in arguments if each[0] not in THEIRS]


@pytest.mark.parametrize("name", sorted(set(public())))
def test_every_path_is_annotated_as_any_path(name: str) -> None:
    for argument, hint in path_arguments(name):
        kinds = typing.get_args(hint)
        assert str in kinds, f"{argument}: {hint}: write StrPath"
        assert os.PathLike[str] in kinds, f"{argument}: {hint}: write StrPath"


def test_a_path_is_text_or_any_path_and_bytes_are_refused_by_the_name_of_the_argument() -> None:
    for given in ("a/b", Path("a/b"), OwnPath("a/b")):
        assert path_of(given, "weights") == Path("a/b")
    with pytest.raises(ConfigError, match=r"weights.*found bytes"):
        path_of(b"a/b", "weights")  # type: ignore[arg-type]
