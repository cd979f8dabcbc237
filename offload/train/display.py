"""How `offload train` shows steps: on the console that it prints to."""

from __future__ import annotations

from rich.console import Console

from offload.display.panel import Display, Run, make_display


def display_on(console: Console, run: Run) -> Display:
    """A panel where `console` is a terminal, else lines."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    return make_display(run, say, on_terminal=console.is_terminal and not console.quiet)
