"""What one step is worth remembering for, as one line of JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Tiers: bytes held after it. Moved: bytes since the start."""

    step: int  # 1-based: steps done
    loss: float
    lr: float
    seconds: float
    tokens_per_second: float
    gradient_norm: float | None
    skipped_steps: int
    rss_nbytes: int
    tiers: dict[str, int]
    moved: dict[str, int]
    validation_loss: float | None = None

    def to_json(self) -> str:
        """One line; what is not finite becomes null, since JSON has no NaN."""
        return json.dumps({name: _finite(value) for name, value in asdict(self).items()})

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """What `to_json` wrote."""
        values = json.loads(line)
        if values["loss"] is None:
            values["loss"] = math.nan
        return cls(**values)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
