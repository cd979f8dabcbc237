"""Values and foreign errors in an error message: one line, not long."""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """Return a value as Python writes it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def one_line(error: BaseException) -> str:
    """Return an error's type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
