"""Reading a YAML file into plain values, remembering the line of every key.

The YAML is the 1.2 core schema in a strict subset: `1e-5` is a number, `on` and `yes` are words,
`010` is ten, a key given twice is an error, aliases and tags are errors (nothing can explode or
build an object), one document per file, bounded in size and depth.
"""

import math
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from offload.tiers.errors import ConfigError, PathError
from offload.tiers.units import format_bytes

MAX_FILE_NBYTES = 128 << 10  # every key with its description takes 20 KiB
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
_CORE = [
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
]


def _install_core_schema(target: Any) -> None:
    target.yaml_implicit_resolvers = {}
    for name, pattern, first in _CORE:
        anchored = re.compile(rf"^(?:{pattern.pattern})$")
        target.add_implicit_resolver(f"{_TAG}{name}", anchored, first)


class CoreLoader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema, which refuses aliases and depth
    before a tree is built."""

    def __init__(self, text: str, source: str = "") -> None:
        super().__init__(text)
        self._source = source
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read one node, as PyYAML calls it. ConfigError for an alias or deep nesting."""
        event = self.peek_event()
        where = f"{self._source}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{where}: the alias *{event.anchor} is not supported; repeat the value"
            )
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class CoreDumper(yaml.SafeDumper):
    """Writes what `CoreLoader` reads back unchanged."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_install_core_schema(CoreLoader)
_install_core_schema(CoreDumper)


@dataclass(frozen=True)
class Document:
    """The values of one YAML text and where each came from."""

    source: str  # the file's name as given, or the override's text
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)  # 1-based

    def line_of(self, path: KeyPath) -> int | None:
        """The line of `path` or of its nearest enclosing key."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def read_document(path: Path) -> Document:
    """Parse the file at `path`. Raise PathError if unreadable, ConfigError if it is not YAML."""
    return parse_document(_read_text(path), str(path))


def parse_document(text: str, source: str) -> Document:
    """Parse YAML `text`; `source` names it in errors."""
    lines: dict[KeyPath, int] = {}
    try:
        node = CoreLoader(text, source).get_single_node()
        value = None if node is None else _value_of(node, (), source, lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = ", ".join(text for text in (error.context, error.problem) if text)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}: character {error.character!r} is not allowed in YAML; "
            "save the file as plain UTF-8 text"
        ) from None
    return Document(source, value, lines)


def dump_yaml(value: Any, *, inline: bool = False) -> str:
    """Return plain values as YAML, keys in their order. `inline`: on one line, without a
    newline."""
    text = yaml.dump(
        value, Dumper=CoreDumper, sort_keys=False, default_flow_style=inline,
        width=math.inf if inline else None,
    )  # fmt: skip
    return text.removesuffix("...\n").rstrip("\n") if inline else text


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise PathError(f"{_named(path)}: cannot read the configuration: {reason}") from None
    except ValueError as error:  # a NUL in the name
        raise PathError(f"{str(path)!r} is no name of a file: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise PathError(f"{path}: cannot read the configuration: it is {kind}; name a YAML file")
    if status.st_size > MAX_FILE_NBYTES:
        raise ConfigError(
            f"{path}: {format_bytes(status.st_size)} is too large for a configuration; "
            f"at most {format_bytes(MAX_FILE_NBYTES)} are read"
        )
    try:
        return path.read_bytes()[: MAX_FILE_NBYTES + 1].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise PathError(f"{path}: cannot read the configuration: {error.strerror}") from None


def _named(path: Path) -> str:
    """Return the text, shortened to a readable length."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _value_of(node: yaml.Node, path: KeyPath, source: str, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping_of(node, path, source, lines)
    if isinstance(node, yaml.SequenceNode):
        values = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            values.append(_value_of(item, (*path, index), source, lines))
        return values
    return _scalar_of(node, source)


def _mapping_of(
    node: yaml.MappingNode, path: KeyPath, source: str, lines: dict[KeyPath, int]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}:{line}: a list or mapping cannot be a key")
        key = key_node.value
        if key in values:
            dotted = ".".join(map(str, (*path, key)))
            raise ConfigError(
                f"{source}:{line}: {dotted}: given twice, first on line {lines[(*path, key)]}; "
                "remove one"
            )
        lines[(*path, key)] = line
        values[key] = _value_of(value_node, (*path, key), source, lines)
    return values


def _scalar_of(node: yaml.Node, source: str) -> str | int | float | bool | None:
    text: str = node.value
    match node.tag.removeprefix(_TAG):
        case "str":
            return text
        case "null":
            return None
        case "bool" if _BOOL.fullmatch(text):
            return text.lower() == "true"
        case "int" if _INT.fullmatch(text):
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            if len(text) <= 40:
                return int(text[2:], base) if base != 10 else int(text)
        case "float" if _FLOAT.fullmatch(text):
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    line = node.start_mark.line + 1
    shown = text if len(text) <= 40 else text[:37] + "..."
    if node.tag == f"{_TAG}int" and _INT.fullmatch(text):
        raise ConfigError(f"{source}:{line}: {shown} has {len(text)} digits; no key takes so many")
    raise ConfigError(f"{source}:{line}: {shown!r} with tag {node.tag!r} is not supported here")
