"""What a run was predicted to take and what it took: bytes per tier, RSS, and seconds per step.

prediction.json    written before the first step: the expected figures of the run's plan
measured.json      written after the last: ledger peaks, peak RSS, seconds of a usual step
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter

from offload.planning.machine.disk_cache import Nbytes, Positive

PREDICTION, MEASURED = "prediction.json", "measured.json"
SETTLING_STEPS = 2  # the first learns the order of uses, the second is the first to fetch ahead


class _Kept:
    """A dataclass that is stored as JSON."""

    def to_json(self) -> str:
        return TypeAdapter(type(self)).dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text that `to_json` wrote. Raise ValueError for any other text."""
        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True)
class Prediction(_Kept):
    """The predicted peaks in bytes, and one step of a long run."""

    tiers: Mapping[str, Nbytes]  # the ledgers' peaks
    rss_nbytes: Nbytes
    seconds: Positive | None  # None: the speeds of the machine are not known
    bounds: tuple[str, ...] = ()  # tiers of which the most is predicted that can come
    format: Literal[1] = 1


@dataclass(frozen=True)
class Measured(_Kept):
    """The measured peaks in bytes and seconds of a usual step (None: too few steps)."""

    tiers: Mapping[str, Nbytes]
    rss_nbytes: Annotated[Nbytes, Field(gt=0)]
    seconds: Positive | None
    steps: Nbytes
    cut_short: bool = False  # by an error, or by a Ctrl-C or SIGTERM before all steps were saved
    stopped: bool = False  # by a Ctrl-C or SIGTERM, and all steps are saved
    format: Literal[1] = 1


def usual_step_s(seconds: Sequence[float]) -> float | None:
    """The median seconds of a run's steps without the first ones; None if there are no others."""
    settled = list(seconds)[SETTLING_STEPS:]
    return statistics.median(settled) if settled else None
