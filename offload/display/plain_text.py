"""Texts of others on a terminal: they may hold what moves its cursor, or worse."""

from __future__ import annotations


def plain(text: str, most: int = 1 << 16) -> str:
    """What of `text` has no effect on a terminal; all else as Python writes it. Cut at `most`."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
