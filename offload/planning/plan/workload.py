"""What one optimizer step is given to work on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """The input of one step, of one rank."""

    batch: int  # sequences per backward pass
    sequence: int  # tokens per sequence
    passes: int = 1  # backward passes per step

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence * self.passes
