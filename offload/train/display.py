"""The display of steps for `offload train`, on the console that it prints to."""

from __future__ import annotations

from rich.console import Console

from offload.display.panel import Display, Run, make_display


def display_on(console: Console, run: Run) -> Display:
    """Return a panel if `console` is a terminal, otherwise lines."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    return make_display(run, say, on_terminal=console.is_terminal and not console.quiet)
