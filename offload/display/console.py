"""The terminal as `rich` writes on it, with texts of others as they are: no markup, no effects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from offload.display.plain_text import plain_lines


class PlainConsole(Console):
    """Whatever is printed, its control characters are shown as Python writes them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As `rich` does, with each text made plain."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain_lines(text), style, control)
