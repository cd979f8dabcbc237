"""Dynamic loss scaling for fp16: halve on overflow, double after a run of good steps.

The rule of PyTorch's GradScaler (and of mixed-precision training, Micikevicius et al. 2018).
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.tiers.errors import OffloadError


@dataclass(slots=True)
class LossScale:
    """`scale` multiplies the loss; `update` says after every step whether it overflowed."""

    scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """OffloadError when gradients overflow at the smallest scale: training has diverged."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale *= self.growth_factor
                self.good_steps = 0
            return
        self.good_steps = 0
        if self.scale <= self.min_scale:
            raise OffloadError(
                f"gradients overflow fp16 at the smallest loss scale ({self.scale:g}); the loss "
                "has diverged: lower the learning rate, or use precision: bf16"
            )
        self.scale = max(self.scale * self.backoff_factor, self.min_scale)
