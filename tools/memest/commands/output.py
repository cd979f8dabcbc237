"""Writes answers and configurations: files as a whole, and only if that is allowed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from offload.tools.memest.show.page import Page

_FILE_COLUMNS = 100  # of a table in a file


def show_answer(
    kind: str, out: Path | None, *, table: Callable[[], RenderableType],
    values: Callable[[], dict[str, Any]], page: Callable[[], Page],
) -> None:  # fmt: skip
    """Write the answer to the file `out`, or to standard output, as a table, json or html, `kind`:
    no other one is computed."""
    if kind == "table":
        if out is None:
            _print(table())
        else:
            _deliver(_text(table()), out)
    elif kind == "json":
        _deliver(json.dumps(values(), indent=2, allow_nan=False) + "\n", out)
    else:
        from offload.tools.memest.show.page import to_html

        _deliver(to_html(page()), out)


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
    text = answer.encode(errors="replace").decode()
    if out is None:
        sys.stdout.write(text)
        return
    from offload.checkpoint.format.disk import write_named

    write_named(out, text, "--out")
