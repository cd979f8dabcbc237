"""Writes an answer in the requested format, to standard output or a file."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.files import write_file
from offload.tools.memest.commands.options import Format, OutputOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from offload.pages.page import Page

_FILE_COLUMNS = 100  # of a table in a file


def show_answer(
    output: OutputOptions, *, table: Callable[[], RenderableType],
    values: Callable[[], dict[str, Any]], page: Callable[[], Page] | None = None,
) -> None:  # fmt: skip
    """Show the answer in the requested format, the only one that is computed. Raise ConfigError for
    a page of what has none."""
    if output.chosen is Format.TABLE:
        if output.out is None:
            _print(table())
        else:
            _deliver(_text(table()), output.out)
    elif output.chosen is Format.JSON:
        _deliver(json.dumps(values(), indent=2, allow_nan=False) + "\n", output.out)
    else:
        from offload.pages.page import to_html

        if page is None:
            raise ConfigError("this command has no page; use --format table or --format json")
        _deliver(to_html(page(), by="memest"), output.out)


def _print(table: RenderableType) -> None:
    from offload.display.console import PlainConsole

    console = PlainConsole()
    if not console.encoding.lower().startswith("utf") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # blocks and dots that it has no letters for
    console.print(table)


def _text(table: RenderableType) -> str:
    from offload.display.console import PlainConsole

    text = io.StringIO()
    PlainConsole(file=text, width=_FILE_COLUMNS, color_system=None).print(table)
    return text.getvalue()


def _deliver(answer: str, out: Path | None) -> None:
    """Write to the file of --out, or to standard output; characters outside UTF-8 become `?`."""
    content = answer.encode(errors="replace")
    if out is not None:
        write_file(out, content, "--out")
    else:
        sys.stdout.write(content.decode())
