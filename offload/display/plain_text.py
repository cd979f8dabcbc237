"""Makes foreign texts safe for a terminal: they may hold what moves its cursor, or worse."""

import re
import sys

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str, max_chars: int = 1 << 16) -> str:
    """Escape all characters that affect a terminal as Python does; cut the text at `max_chars`."""
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def plain_lines(text: str) -> str:
    """Escape a text of several lines in the same way, uncut."""
    if text.isprintable():
        return text
    return "\n".join(plain(line, len(line)) for line in text.split("\n"))


def without_controls(text: str) -> str:
    """Escape the control characters of a text in any language; line breaks and tabs stay, and so do
    unprintable characters that do not move the cursor."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def echo(text: str, *, err: bool = False) -> None:
    """Print lines that may contain foreign names."""
    print(plain_lines(text), file=sys.stderr if err else sys.stdout, flush=True)
