"""Whether a command line of a page could be run: programs, commands, options, targets, files."""

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import typer
import typer.main

from tests.docs.code_blocks import ROOT

# typer brings its own click, or uses the one that is installed: this is whichever it is
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_SETTING = re.compile(r"[A-Z][A-Z0-9_]*=.*")  # of the environment


class CommandError(Exception):
    """A command, option or file of a line that does not exist."""


def lines_of(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each command, and the number of its line in `text`, from 0. Comments and what
    programs have printed (lines after one with a `$ `) are left out."""
    prompts = any(line.startswith("$ ") for line in text.splitlines())
    joined, first = "", 0
    for number, line in enumerate(text.splitlines()):
        if not joined:
            first = number
            if prompts and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            words = shlex.split(joined, comments=True)
            joined = ""
            if words:
                yield first, words


def check(words: list[str]) -> None:
    """CommandError unless the command can be run, as far as that shows without running it."""
    while words and _SETTING.fullmatch(words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    program = words[0].removeprefix(".venv/bin/")
    if program not in PROGRAMS:
        raise CommandError(f"{program}: none of {', '.join(PROGRAMS)}")
    PROGRAMS[program](words[1:])


# ---------------------------------------------------------------- commands of offload
def _offload(words: list[str]) -> None:
    from offload.cli.app import app

    _parse(app, "offload", words)


def _memest(words: list[str]) -> None:
    from offload.tools.memest.cli import app

    _parse(app, "memest", words)


@cache
def _command(app: typer.Typer) -> Any:
    return typer.main.get_command(app)


def _parse(app: typer.Typer, name: str, words: list[str]) -> None:
    """Parse as the program would, up to the call of the command's function."""
    command: Any = _command(app)
    context, path = None, name
    try:
        while True:
            context = command.make_context(path, list(words), parent=context)
            if not hasattr(command, "commands"):
                break
            left = [*context._protected_args, *context.args]
            path, command, words = command.resolve_command(context, left)
    except typer.Exit as ended:
        if ended.exit_code:
            raise CommandError(f"{name}: exit code {ended.exit_code}") from None
        return  # --help, --version
    except _UsageError as error:
        said = error.format_message()  # type: ignore[attr-defined]
        if "does not exist" not in said:  # files of the reader
            raise CommandError(f"{name}: {said}") from None
        return
    _check_overrides(context.params.get("option"))


def _check_overrides(overrides: Any) -> None:
    """`-o key=value`: the key is there, and takes such a value."""
    from offload.config.reference import explained
    from offload.errors import ConfigError

    try:
        for override in overrides or ():
            explained(override.partition("=")[0])
    except ConfigError as error:
        raise CommandError(f"-o {error}") from None


# ---------------------------------------------------------------- others
def _make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    for word in words:
        if not _SETTING.fullmatch(word) and word not in targets:
            raise CommandError(f"make: there is no target {word}")


def _source(words: list[str]) -> None:
    """Check that the line activates the environment of `make venv`."""
    if words != [".venv/bin/activate"]:
        raise CommandError(f"source: there is no {' '.join(words)}")


def _python(words: list[str]) -> None:
    """A module or a file of the repository, or one of the reader's: `train.py`."""
    if words[:2] == ["-m", "pip"]:
        return _pip(words[2:])
    if words[0] == "-m":
        return _module(words[1], words[2:])
    return _script(words[0])


def _module(name: str, words: list[str]) -> None:
    if name in ("pytest", "torch.distributed.run"):
        return _files(words) if name == "pytest" else None
    if name == "offload":
        return _offload(words)
    parts = ROOT / name.replace(".", "/")
    if not parts.with_suffix(".py").is_file() and not (parts / "__main__.py").is_file():
        raise CommandError(f"python -m {name}: there is no such module")
    return None


def _script(name: str) -> None:
    if "/" in name and not (ROOT / name).is_file():
        raise CommandError(f"python {name}: there is no such file")


def _files(words: list[str]) -> None:
    for word in words:
        path = word.partition("::")[0]
        if path.startswith(("tests/", "examples/", "docs/")) and not (ROOT / path).exists():
            raise CommandError(f"{path}: there is no such file")


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _raise  # type: ignore[method-assign]
    given = parser.parse_args(words)
    if given.module:
        return _module(given.training_script, given.training_script_args)
    return _script(given.training_script)


def _raise(message: str) -> Any:
    raise CommandError(message)


def _pip(words: list[str]) -> None:
    """Extras are those of pyproject.toml."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in words:
        match = re.fullmatch(r"(?:\.|offload)\[([\w,-]+)\]", word)
        for extra in match[1].split(",") if match else ():
            if extra not in extras:
                raise CommandError(f"pip: there is no extra {extra}")


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "offload": _offload, "memest": _memest, "make": _make, "python": _python,
    "torchrun": _torchrun, "pip": _pip, "source": _source,
}  # fmt: skip
