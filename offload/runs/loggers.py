"""The list of loggers, which get the figures of every step of a run.

To add one, write it here and name it in `loggers_of`; `offload train` and the run folder of a loop
of one's own both log to that list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from offload.runs.folder import RunFolder


class Logger(Protocol):
    """Gets every step's figures, in order, on the thread that trains."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """`values` are those of a `StepMetrics`, by name: numbers, None for what is not known, and
        bytes by tier and by link. They are not to be changed."""


def loggers_of(folder: RunFolder) -> list[Logger]:
    """The loggers of every run, on the first rank only."""
    return [folder.metrics]
