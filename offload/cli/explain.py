"""`offload config explain`: a key of the configuration, or a section, in words."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from offload.config.reference import Key, explained
from offload.display.console import PlainConsole


def print_explanation(name: str) -> None:
    """Print the explanation of a key. Raise ConfigError if there is no such key."""
    key = explained(name)
    console = PlainConsole()
    if key.name:
        console.print(Text(key.name, style="bold"))
    console.print(key.meaning)
    console.print()
    if not key.keys:
        console.print(_facts(key))
        return
    console.print(_section(key))
    one = next(inner for inner in key.all() if not inner.keys)
    console.print(f"\nMore of one: offload config explain {one.name}")


def _facts(key: Key) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts(key):
        table.add_row(name, text)
    return table


def facts(key: Key) -> Iterator[tuple[str, str]]:
    """Yield what is known about a value beside its meaning, as pairs of a label and a text."""
    yield "type", key.type
    if key.unit:
        yield "unit", key.unit
    yield "default", key.default
    yield "example", key.example


def _section(section: Key) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=20)
    table.add_column("meaning", overflow="fold")
    for key in section.keys:
        inside = f"{key.path[-1]}: ..." if key.keys else key.path[-1]
        table.add_row(inside, key.default, key.meaning.partition(". ")[0].rstrip("."))
    return table
