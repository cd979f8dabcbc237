"""A context that raises an error of one rank on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.tiers.errors import CheckpointError
from offload.zero.ranks.ranks import Ranks


@contextmanager
def on_all(ranks: Ranks | None, failed: str) -> Iterator[None]:
    """A context in which an error on any rank is raised on every rank; on the others it is a
    CheckpointError that begins with `failed`."""
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        if ranks is None:
            raise
        error = failure
    if ranks is None:
        return
    told = ranks.all_succeeded(error)
    if error is not None:
        raise error
    if told is not None:
        raise CheckpointError(f"{failed}; {told}")
