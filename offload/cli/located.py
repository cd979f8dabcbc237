"""Adds the file and line of a key that does not work on this machine to its error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offload.config import OffloadConfig
from offload.config.source import load_source
from offload.tiers.errors import BudgetError, ConfigError

_KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): ")


@contextmanager
def located(file: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Add the file and line to errors about budgets, paths and devices that begin with a key.

    These errors are raised long after `file` was read, by code that does not know it.
    """
    try:
        yield
    except (BudgetError, ConfigError) as error:
        key = _KEY.match(str(error))
        path = key.group(1).split(".") if key else [""]
        if path[0] not in OffloadConfig.model_fields:
            raise
        place = load_source(file, overrides).place_of(tuple(path))
        kind = BudgetError if isinstance(error, BudgetError) else ConfigError
        raise kind(f"{place}: {error}") from error
