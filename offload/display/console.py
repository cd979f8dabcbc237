"""A terminal written to by `rich`, with names shown without effects and commands kept whole."""

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from offload.display.plain_text import plain_lines

_WORDS = re.compile(r"(?:`[^`]*`|\S)+")


class Prose:
    """A text that wraps between words but never within a `command`: one that is longer than a line
    is left to the terminal to wrap, so that it can be copied."""

    def __init__(self, text: str, *, first: str = "", command: bool = False) -> None:
        """`first` is printed before the text, as wide as the indent of further lines. With
        `command`, the whole text is one command."""
        self._text = plain_lines(text)
        self._first = first
        self._is_command = command

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = " " * cell_len(self._first)
        for number, line in enumerate(self.lines(options.max_width - len(indent))):
            start = indent if number else self._first
            yield Text(start + line, no_wrap=True, overflow="ignore")

    def lines(self, columns: int) -> Iterator[str]:
        """Lines of at most `columns`, unless a single word or command is wider."""
        for paragraph in self._text.split("\n"):
            line = ""
            for word in [paragraph] if self._is_command else _WORDS.findall(paragraph):
                if line and cell_len(line) + 1 + cell_len(word) > columns:
                    yield line
                    line = ""
                line += f" {word}" if line else word
            yield line


class PlainConsole(Console):
    """A console that shows the control characters in printed texts as Python escapes. Texts are
    printed as `Prose`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like `rich`, with the parts of a group one after the other."""
        if len(objects) != 1 or options.get("soft_wrap"):
            super().print(*objects, **options)
            return
        for part in objects[0].renderables if isinstance(objects[0], Group) else objects:
            shown = Prose(part) if isinstance(part, str) else part
            super().print(shown, **{"crop": not isinstance(shown, Prose), **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render like `rich`, with each text made plain."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain_lines(text), style, control)


def table(*headings: str, numbers: Container[int] = (), title: str | None = None) -> Table:
    """Return a table without lines. The columns `numbers` are to the right and in one piece; the
    others are folded where the terminal is narrow."""
    made = Table(
        box=None, pad_edge=False, show_edge=False, header_style="bold", title=title,
        title_justify="left",
    )  # fmt: skip
    for index, heading in enumerate(headings):
        if index in numbers:
            made.add_column(heading, justify="right", no_wrap=True)
        else:
            made.add_column(heading, overflow="fold")
    return made
